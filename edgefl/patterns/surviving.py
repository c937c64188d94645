"""All-reduce that the survivors of a loss finish: whoever is gone is left out of the ring.

Members may be a step apart when somebody goes: some have a mean that others have not. So they agree on who is
left and tell each other which mean they need. Whoever has it gives it to those who do not; where nobody has,
the ring without the lost begins that step anew with the same inputs. All means are bit-equal at all who live.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgefl.errors import PeerGone
from edgefl.nodes import Gone, Message, Node
from edgefl.parameters import Vector
from edgefl.patterns.all_reduce import CalledOff, Chunk, all_reduce_mean
from edgefl.patterns.farewell import Finished


@dataclass(frozen=True)
class Regroup(Message):
    """Somebody is gone. members: who is left, as its sender has heard; step: of the mean that it lacks."""

    members: tuple[int, ...]
    step: int


@dataclass(frozen=True)
class Missed(Message):
    """The mean that its receivers need next. members: of the agreement that it follows from."""

    members: tuple[int, ...]
    mean: Vector


MESSAGES = (Chunk, Regroup, Missed, Finished)


class SurvivingRing:
    """One node's place in a ring. members: node ids in ring order, this one among them, the same at all."""

    def __init__(self, node: Node, members: Iterable[int]) -> None:
        self.node, self.members = node, tuple(members)
        self._size, self._agreed = len(self.members), self.members
        self._last: Vector | None = None
        self._early: dict[int, Regroup] = {}
        """The newest of each member since the last agreement."""

    @property
    def others(self) -> list[int]:
        return [j for j in self.members if j != self.node.id]

    async def mean(self, x: Vector, step: int) -> Vector:
        """The mean over the members that live of their `x` of a step, all of the same weight.

        Steps count from 0, without gaps. Raises PeerGone where the others have left this node out.
        """
        result = None
        while result is None:
            heeded = [self._heeds(m) for m in self.node.take(Regroup)]
            if any(heeded):
                result = await self._agree(step)
                continue
            news = self.node.receive(Regroup, Gone, sender=self.others)
            tag = (self._size - len(self.members) << 40) + step
            try:
                result = await all_reduce_mean(
                    self.node, self.members, x, weight=None, tag=tag, unless=(news,)
                )
            except PeerGone as gone:
                if isinstance(gone, CalledOff):
                    self._heeds(gone.message)
                result = await self._agree(step)
        self._last = result
        return result

    async def end(self, num_steps: int) -> None:
        """Stay, with the last mean, until all members that live have all `num_steps` means."""
        self.node.send(self.others, Finished())
        waiting = set(self.others)
        while waiting:
            m = await self.node.receive(Finished, Regroup, Gone, sender=waiting)
            if not isinstance(m, Regroup):
                waiting.discard(m.sender)
            elif self._heeds(m):
                await self._agree(num_steps)
                waiting &= set(self.members)

    async def _agree(self, step: int) -> Vector | None:
        """Agree on who is left. The mean of `step` where others have it and this node has not, else None."""
        node = self.node
        while True:
            self.members = tuple(j for j in self.members if j == node.id or node.fleet.alive(j))
            members = self.members
            node.send(self.others, Regroup(members, step))
            steps = await self._steps_of_all(step)
            if steps is None:
                continue
            self._agreed, low = members, min(steps.values())
            ahead = [j for j in members if steps[j] > low]
            if ahead and ahead[0] == node.id:
                assert self._last is not None
                node.send([j for j in members if steps[j] == low], Missed(members, self._last))
            if not ahead or step > low:
                return None
            m = await node.receive(Missed, Gone, sender=ahead[0], members=members)
            if isinstance(m, Missed):
                return m.mean

    async def _steps_of_all(self, step: int) -> dict[int, int] | None:
        """Which mean each member lacks; None where one more is gone."""
        members = self.members
        while self.members == members:
            steps = {j: m.step for j, m in self._early.items() if m.members == members}
            steps[self.node.id] = step
            if len(steps) == len(members):
                return steps
            waiting = [j for j in members if j not in steps]
            m: Message = await self.node.receive(Regroup, Gone, sender=waiting)
            if isinstance(m, Gone):
                break
            self._heeds(m)
        return None

    def _heeds(self, m: Message) -> bool:
        """Take in who is left as another member has heard. False: that was agreed on before."""
        if not isinstance(m, Regroup) or set(self._agreed) <= set(m.members):
            return False
        if self.node.id not in m.members:
            raise PeerGone(m.sender)
        self._early[m.sender] = m
        self.members = tuple(j for j in self.members if j in m.members)
        return True
