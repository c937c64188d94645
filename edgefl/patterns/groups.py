"""Groups of nodes that meet one after the other: buffers of groups per member, and who may meet now.

Source: Prague's Group Buffer and conflict-free firing (Luo et al. 2020, https://doi.org/10.1145/3373376.3378499).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

ANYBODY = -1
"""Initiator of a group that answers the requests of all of its members."""


@dataclass
class Group:
    """members: ascending. initiator: whose request it answers, or ANYBODY. Once it runs: waits_for, who has
    not reported; failed, who reported that it came to nothing."""

    id: int
    members: list[int]
    initiator: int = ANYBODY
    running: bool = False
    waits_for: set[int] = field(default_factory=set)
    failed: list[int] = field(default_factory=list)

    def answers(self, member: int) -> bool:
        return self.initiator in (ANYBODY, member)


class GroupBuffers:
    """One FIFO of groups per node. A group fires when it heads the buffers of all of its members, and all
    of them wait with an unanswered request. The oldest group heads all of its buffers, and no node is in two
    running groups: nothing can lock up. first_id: groups are numbered from here.
    """

    def __init__(self, nodes: Iterable[int], first_id: int = 0) -> None:
        self._buffers: dict[int, deque[Group]] = {w: deque() for w in nodes}
        self._groups: dict[int, Group] = {}
        self._unanswered: set[int] = set()
        self._busy: set[int] = set()
        self._touched: dict[int, None] = {}
        self.next_id = first_id

    def is_empty(self, w: int) -> bool:
        """Whether no group is planned for node w."""
        return not self._buffers[w]

    def request(self, w: int) -> None:
        """Node w waits for a group."""
        self._unanswered.add(w)
        self._touched[w] = None

    def add(self, members: Collection[int], initiator: int = ANYBODY) -> None:
        """A new group, behind those that its members are in already."""
        group = Group(self.next_id, sorted(members), initiator)
        self.next_id += 1
        self._groups[group.id] = group
        for w in group.members:
            self._buffers[w].append(group)
            self._touched[w] = None

    def done(self, w: int, group_id: int) -> None:
        """Node w has what its group came to."""
        group = self._reported(w, group_id)
        if group is not None:
            self._leave(w, group)
            self._settle(group)

    def failed(self, w: int, group_id: int) -> None:
        """Node w's group came to nothing: a member went. It meets those who say the same, as a new group."""
        group = self._reported(w, group_id)
        if group is not None:
            group.failed.append(w)
            self._settle(group)

    def lose(self, w: int) -> list[Group]:
        """Node w is gone, or takes part no more. Returns the running groups, at most one, that it was in."""
        broken = []
        for group in self._buffers[w]:
            group.members.remove(w)
            self._touched.update(dict.fromkeys(group.members))
            if group.running:
                broken.append(group)
                group.waits_for.discard(w)
                group.failed = [v for v in group.failed if v != w]
                self._settle(group)
            elif not group.members:
                del self._groups[group.id]
        self._buffers[w].clear()
        self._unanswered.discard(w)
        self._busy.discard(w)
        return broken

    def fire(self) -> list[Group]:
        """The groups that may meet now, in the order of their ids; they run from now on."""
        fired = []
        while self._touched:
            w = next(iter(self._touched))
            del self._touched[w]
            group = self._buffers[w][0] if self._buffers[w] else None
            if group is not None and not group.running and self._may_fire(group):
                self._start(group)
                fired.append(group)
        return sorted(fired, key=lambda group: group.id)

    def _may_fire(self, group: Group) -> bool:
        return all(
            v in self._unanswered and v not in self._busy and self._buffers[v][0] is group
            for v in group.members
        )

    def _start(self, group: Group) -> None:
        group.running = True
        self._unanswered.difference_update(v for v in group.members if group.answers(v))
        if len(group.members) == 1:
            self._leave(group.members[0], group)
            del self._groups[group.id]
            return
        self._busy.update(group.members)
        group.waits_for = set(group.members)

    def _reported(self, w: int, group_id: int) -> Group | None:
        group = self._groups.get(group_id)
        if group is None or w not in group.waits_for:
            return None
        group.waits_for.remove(w)
        return group

    def _leave(self, w: int, group: Group) -> None:
        assert self._buffers[w][0] is group
        self._buffers[w].popleft()
        self._busy.discard(w)
        self._touched[w] = None

    def _settle(self, group: Group) -> None:
        """All who live have reported: those for whom it failed meet as a new group, at the same place."""
        if group.waits_for or self._groups.pop(group.id, None) is None or not group.failed:
            return
        again = Group(self.next_id, sorted(group.failed), group.initiator)
        self.next_id += 1
        self._groups[again.id] = again
        for w in again.members:
            self._buffers[w][0] = again
            self._busy.discard(w)
            if again.answers(w):
                self._unanswered.add(w)
            self._touched[w] = None


def divide(nodes: Sequence[int], size: int, rng: np.random.Generator) -> list[list[int]]:
    """Disjoint groups of about `size` that cover `nodes`.

    They are max(1, floor(n / size + 1/2)) consecutive parts of a shuffle, longer ones first, of sizes that
    differ by at most one.
    """
    parts = np.array_split(rng.permutation(np.asarray(nodes)), max(1, int(len(nodes) / size + 0.5)))
    return [sorted(part.tolist()) for part in parts]


def divide_by_machine(machines: Sequence[Sequence[int]], rng: np.random.Generator) -> list[list[int]]:
    """Two groups per node, one after the other (Prague's inter-intra division).

    First one random head of each machine together, and each machine's others; then each machine as a whole.
    machines: the nodes of each; empty ones are left out.
    """
    machines = [machine for machine in machines if machine]
    heads = [int(rng.choice(np.asarray(machine))) for machine in machines]
    others = [[w for w in machine if w != head] for machine, head in zip(machines, heads, strict=True)]
    return [heads, *(rest for rest in others if rest), *(list(machine) for machine in machines)]
