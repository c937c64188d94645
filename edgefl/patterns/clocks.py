"""Clocks of a parameter server's clients: who has completed how many, and what their changes sum to."""

from __future__ import annotations

from typing import Any, Literal

from edgefl.nodes import Node
from edgefl.parameters import Vector

Reads = Literal["newest", "complete"]


class Clocks:
    """Who has completed how many clocks, and what their changes sum to.

    low: the minimum. x: the start and all changes, or with complete reads those of clocks below `low`, and
    `ahead` the others. turns: how often each has been given the model; counted: the turn of its last change
    that counted. waiting: who is to be given the model, and since when.
    """

    def __init__(self, node: Node, reads: Reads) -> None:
        clients = node.fleet.ids("client")
        zero = {
            "low": 0,
            "done": dict.fromkeys(clients, 0),
            "ahead": {},
            "turns": {},
            "counted": {},
            "life": -1,
        }
        saved = node.saved or {"x": node.model.init(), **zero}
        self._node, self._reads = node, reads
        self.x: Vector = saved["x"]
        self.low: int = saved["low"]
        self.done: dict[int, int] = dict(saved["done"])
        self.ahead: dict[int, dict[int, Vector]] = {c: dict(by) for c, by in saved["ahead"].items()}
        self.turns: dict[int, int] = dict(saved["turns"])
        self.counted: dict[int, int] = dict(saved["counted"])
        if saved["life"] == node.life:
            self.active, self.waiting = set(saved["active"]), dict(saved["waiting"])
        else:  # in a new life nobody is known to be at work
            self.active = set(node.fleet.living(clients))
            self.waiting = dict.fromkeys(sorted(self.active), node.now())

    def leave(self, k: int) -> None:
        """Client k is gone: the minimum does without it."""
        self.active.discard(k)
        self.waiting.pop(k, None)

    def enter(self, k: int) -> None:
        """Client k is back: it goes on from the minimum."""
        self.active.add(k)
        self.done[k], self.waiting[k] = self.low, self._node.now()

    def begin(self, k: int) -> float:
        """Client k is given the model. Returns how long it has waited for it, s."""
        self.turns[k] = self.turns.get(k, -1) + 1
        since_s: float = self.waiting.pop(k)
        return self._node.now() - since_s

    def push(self, k: int, change: Vector | None) -> None:
        """Client k has completed a clock; change: None where it was refused."""
        if change is not None:
            self.counted[k] = self.turns[k]
            if self._reads == "newest":
                self.x = self.x + change
            else:
                mine = self.ahead.setdefault(self.done[k], {})
                mine[k] = mine[k] + change if k in mine else change  # of an earlier life, too
        self.done[k] += 1
        self.waiting[k] = self._node.now()

    def advance(self) -> bool:
        """Move the minimum as far as it goes, and complete the clocks below it; False where it stays."""
        low = self.low
        self.low = max(low, min((self.done[k] for k in self.active), default=low))
        for clock in sorted(c for c in self.ahead if c < self.low):
            for _, change in sorted(self.ahead.pop(clock).items()):
                self.x = self.x + change
        return self.low > low

    def view(self, k: int) -> Vector:
        """What client k reads now."""
        view = self.x
        for clock in sorted(self.ahead):
            if k in self.ahead[clock]:
                view = view + self.ahead[clock][k]
        return view

    def state(self) -> dict[str, Any]:
        """For a save."""
        return {
            "x": self.x,
            "low": self.low,
            "done": dict(self.done),
            "ahead": {c: dict(by) for c, by in self.ahead.items()},
            "turns": dict(self.turns),
            "counted": dict(self.counted),
            "active": tuple(sorted(self.active)),
            "waiting": dict(self.waiting),
            "life": self._node.life,
        }
