"""An asynchronous server: who is at work, how stale an update is, and what that makes of its weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import Field

from edgefl.nodes import Message, MethodConfig, Node
from edgefl.parameters import Vector
from edgefl.patterns.reports import MOST_NORM, Intake


class StalenessConfig(MethodConfig):
    """How an asynchronous server takes updates that started from an older model."""

    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    """s(u): 1; (1 + u)^-a; or 1 up to u = b, then 1 / (a (u - b) + 1)."""
    staleness_a: float | None = Field(default=None, gt=0)
    """a: 0.5 for polynomial and 10 for hinge where not given."""
    staleness_b: int = Field(default=4, ge=0)
    """b: versions that a hinge forgives."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Older updates are dropped."""
    concurrency: int | None = Field(default=None, ge=1)
    """Most clients at work at a time."""
    max_update_norm: float = Field(default=MOST_NORM, gt=0)
    """Larger changes of a client are refused."""


def discount(config: StalenessConfig, u: int) -> float:
    """s(u), the factor by which staleness u shrinks an update's weight; 1 at u = 0.

    Source: FedAsync (Xie et al. 2019, section 5.2, https://arxiv.org/abs/1903.03934).

    >>> discount(StalenessConfig(staleness="hinge"), 4), discount(StalenessConfig(staleness="hinge"), 5)
    (1.0, 0.09090909090909091)
    """
    a, b = config.staleness_a, config.staleness_b
    if config.staleness == "polynomial":
        return float((1 + u) ** -(0.5 if a is None else a))
    if config.staleness == "hinge" and u > b:
        return 1 / ((10 if a is None else a) * (u - b) + 1)
    return 1.0


class Merge(Protocol):
    """What an update makes of the model: the one place in which asynchronous servers differ."""

    def opened(self, intake: Intake, m: Any, x: Vector, start: Vector | None) -> Vector | None:
        """What an update carries, checked; None: refused. start: the model that it began from, if known."""
        ...

    def take(self, x: Vector, update: Vector, u: int) -> Vector | None:
        """The new model after an update of staleness u; None while there is none."""
        ...

    def state(self) -> Any:
        """What a save must hold of it."""
        ...


class Chains:
    """Each client's chain of work: given a model, it trains and sends an update, and is given the next.

    turns: how often each client has been given a model. starts: which, while it is out and where `keep`
    asks for that. counted: the turn of each one's last update that counted. A client that is gone ends
    its own chain; work that an earlier life was given counts but frees nobody.
    """

    def __init__(self, node: Node, clients: Sequence[int], saved: Mapping[str, Any], *, keep: bool) -> None:
        self._node, self._keep = node, keep
        self._most = node.config.concurrency or len(clients)
        self.turns: dict[int, int] = dict(saved.get("turns", {}))
        self.counted: dict[int, int] = dict(saved.get("counted", {}))
        self._resting, self._working = dict.fromkeys(clients), set[int]()
        self.starts: dict[int, Vector] = {}
        if saved.get("life") == node.life:  # in a new life nobody is known to be at work
            self._resting, self._working = dict.fromkeys(saved["resting"]), set(saved["working"])
            self.starts = dict(saved["starts"])

    def hand_out(self, x: Vector, ask: Callable[[int, int, int], Message]) -> None:
        """Give the model to those who rest, as far as concurrency allows.

        ask(k, turn, counted): the message for client k.
        """
        while self._resting and len(self._working) < self._most:
            k = next(iter(self._resting))
            del self._resting[k]
            if self._node.fleet.alive(k):
                self._working.add(k)
                self.turns[k] = self.turns.get(k, -1) + 1
                if self._keep:
                    self.starts[k] = x
                self._node.send(k, ask(k, self.turns[k], self.counted.get(k, -1)))

    def is_current(self, k: int, given: int, turn: int) -> bool:
        """Whether an update answers what client k was given last; given: in which life of the server."""
        return given == self._node.life and self.turns.get(k) == turn

    def was_given(self, k: int, given: int, turn: int) -> bool:
        """Whether client k can have had this turn; not all turns of an earlier life are known."""
        here = given == self._node.life
        return 0 <= given <= self._node.life and turn >= 0 and (not here or turn <= self.turns.get(k, -1))

    def rest(self, k: int) -> None:
        """Client k has sent its update, or has returned: it is free for more."""
        self._end(k)
        self._resting[k] = None

    def lose(self, k: int) -> None:
        """Client k is gone, and what it had begun with it."""
        if k in self._working:
            self._node.record(lost=1)
        self._end(k)

    def _end(self, k: int) -> None:
        self._working.discard(k)
        self.starts.pop(k, None)

    def state(self) -> dict[str, Any]:
        """For a save."""
        return {
            "turns": dict(self.turns),
            "counted": dict(self.counted),
            "resting": tuple(self._resting),
            "working": tuple(sorted(self._working)),
            "starts": dict(self.starts),
            "life": self._node.life,
        }
