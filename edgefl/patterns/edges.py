"""The edges of a node that steps together with its neighbors, when neighbors crash and return.

An edge is dropped when an end is gone. Who returns says so to its living neighbors (Join), and each answers
with a step that it has not begun (Ready). The node goes on at the latest of these and of its own, and says
which it is (Join, begins): from that step on the edge is there again, for both ends. Nobody begins a step
while a neighbor that has returned has not said when it begins; everybody answers while it waits, so that this
ends. A neighbor that does not answer for long has made its steps and left: the edge stays dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeVar

from edgefl.nodes import Back, Gone, Message, Node
from edgefl.patterns.farewell import patience_s

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Join(Message):
    """Its sender has returned, and had come to step `at`.

    begins: it goes on at `at`; with -1 without the receiver.
    """

    at: int
    begins: bool


@dataclass(frozen=True)
class Ready(Message):
    """To a Join: the first step that its sender has not begun. asked: the life that asked.

    joins: the sender is on its way back itself, and says later when it begins.
    """

    at: int
    asked: int
    joins: bool


MESSAGES = (Join, Ready)


class Edges:
    """One node's edges. since: from which step on each neighbor takes part; without those that are gone."""

    def __init__(self, node: Node, since: dict[int, int] | None = None) -> None:
        """since: as it was saved before an interruption."""
        self.node = node
        everybody = dict.fromkeys(node.fleet.neighbors, 0)
        self.since = {} if node.life else everybody if since is None else dict(since)
        self._lives: dict[int, int] = {}
        """The newest life of each neighbor that has returned."""
        self._pending: set[int] = set()
        """Neighbors that have returned and have not said when they begin."""
        self._begun: dict[int, Join] = {}
        """When others begin who said so before it was known that they return: a Join may overtake a Ready."""

    async def begin(self, step: int) -> int:
        """The step to go on at: `step`, or the agreed one after a return."""
        node = self.node
        if not node.life:
            return step
        waiting = set(node.fleet.living(node.fleet.neighbors))
        node.send(sorted(waiting), Join(step, False))
        patience, answers = patience_s(node, 1), {}
        while waiting:
            answer = node.receive(Ready, Gone, sender=waiting)
            m = await node.first(answer, node.receive(Join), timeout_s=patience)
            if m is None:
                break
            if isinstance(m, Join):
                self._hear(m, step, joins=True)
                if not m.begins and m.sender not in waiting:  # else its Ready is under way, and says more
                    answers[m.sender] = m.at
            elif isinstance(m, Gone):
                waiting.discard(m.sender)
                answers.pop(m.sender, None)
                self._pending.discard(m.sender)
            elif m.asked == node.life and m.life >= self._lives.get(m.sender, 0):
                waiting.discard(m.sender)
                answers[m.sender] = m.at
                begun = self._begun.get(m.sender)
                if m.joins:
                    self._pending.add(m.sender)
                    self._lives[m.sender] = m.life
                    if begun is not None and begun.life == m.life:
                        self._hear(begun, step)
                else:
                    self._pending.discard(m.sender)
                    self.since[m.sender] = 0
        start = max([step, *answers.values()])
        node.send(sorted(answers), Join(start, True))
        node.send(sorted(waiting), Join(-1, True))
        self._pending -= waiting
        self.since = {j: max(start, since) for j, since in self.since.items() if j in answers}
        return start

    async def settled(self, step: int) -> list[int]:
        """Who takes part in a step that begins now, ascending."""
        for m in self.node.take(Join):
            self._hear(m, step)
        while self._pending:
            gone = self.node.receive(Gone, sender=self._pending)
            m = await self.node.first(self.node.receive(Join), gone)
            if isinstance(m, Join):
                self._hear(m, step)
            else:
                self._pending.discard(m.sender)
        return sorted(j for j, since in self.since.items() if since <= step)

    async def gather(self, kind: type[M], senders: list[int], step: int) -> AsyncIterator[M]:
        """One message of this kind and step from each of `senders` that lives, as they arrive."""
        node, waiting = self.node, set(senders)
        # Always from the neighbors that take part by then; over gRPC nobody misses who is back soon.
        news = node.first(node.receive(kind, Gone, Back, sender=self.since, step=step), node.receive(Join))
        while waiting:
            m = await news
            if isinstance(m, Join):
                self._hear(m, step + 1)
            elif isinstance(m, kind):
                if m.life >= self._lives.get(m.sender, 0) and m.sender in waiting:
                    waiting.discard(m.sender)
                    yield m
            elif isinstance(m, Gone) or m.life > self._lives.get(m.sender, 0):
                self.since.pop(m.sender, None)
            waiting &= self.since.keys()

    def _hear(self, m: Join, step: int, *, joins: bool = False) -> None:
        """step: the first that this node has not begun."""
        if m.life < self._lives.get(m.sender, 0):
            return
        if not m.begins:
            self._lives[m.sender] = m.life
            self.since.pop(m.sender, None)
            self._pending.add(m.sender)
            self.node.send(m.sender, Ready(step, m.life, joins))
        elif m.sender in self._pending:
            self._pending.discard(m.sender)
            if m.at >= 0:
                self.since[m.sender] = m.at
        else:
            self._begun[m.sender] = m
