"""The leader of a pipeline: it says who does what, watches over all, and lets those who are left go on.

The lowest peer leads. When a member is gone or has come back, the step under way is void: the leader calls
all who live, and each says how many steps it has made and what it holds. They go on from the greatest step
at which every block is held by somebody, on the plan for those who live: the fleet's own stages as long as
each has a device left, whose share of the rows then covers the lost ones'; else new stages. Whoever lacks
blocks of its stage is handed them first. Where nobody who lives holds a block, all wait for the lost.

A device that was away takes part again as soon as it is back. What it holds may be of steps that have been
made anew since, equal but for rounding: it counts only where nobody else holds the like. Nothing is taken
back by more than the steps since the last copy (one without copies), however long somebody was away.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from edgefl.errors import Unreachable
from edgefl.methods.split.pipeline_messages import Attempt, Called, Done, Here, Over, Position, Resume
from edgefl.nodes import Back, Gone, Message, Node
from edgefl.patterns.farewell import Leaving
from edgefl.planning.fleet import plan_for, plan_for_living
from edgefl.planning.pipeline import PipelinePlan, Policy, Stage

if TYPE_CHECKING:
    from edgefl.methods.split.pipeline import Member


def resume(plan: PipelinePlan, attempt: Attempt, step: int, **more: Any) -> Resume:
    """What says the plan, and where to go on."""
    stages = tuple((s.first, s.last, s.devices, s.shares) for s in plan.stages)
    return Resume(
        attempt, step, stages, plan.batch, plan.num_micro, plan.policy, plan.warmup, plan.chunk, **more
    )


def plan_of(m: Resume) -> PipelinePlan:
    """The plan that a message says."""
    policy: Any = m.policy
    stages = tuple(Stage(*stage) for stage in m.stages)
    return PipelinePlan(stages, m.batch, m.num_micro, policy, m.warmup, m.chunk)


class Leader:
    """One life of the leader. member: the device's own stage, in whose state it is kept that all are done."""

    def __init__(self, node: Node, policies: Sequence[Policy], member: Member) -> None:
        self.node, self.policies, self.member = node, policies, member
        self.home = plan_for(node, policies).plan
        self.attempt: Attempt = (node.life, 0)
        self.left: set[int] = set()
        """Devices that came back and went again, as they had heard nothing."""

    async def run(self) -> None:
        """Start all, call them together when one is lost or back, and end the run when all are done.

        That all are done is saved: a leader that is lost while it ends the run would else call devices that
        have left.
        """
        node, over = self.node, bool(self.node.saved and self.node.saved.get("over"))
        told = resume(self.home, self.attempt, 0, line=node.fleet.ids())
        if node.life and not over:
            told = await self._assemble()
        while not over:
            node.send(self._living(), told)
            if await self._all_done(told):
                await node.save(over=True, **self.member.state())
                break
            node.note("stopped", self._why(plan_of(told)))
            told = await self._assemble()
            node.note("resumed", self._how(told))
        await self._end()
        node.send(node.id, Over())

    def _living(self) -> list[int]:
        return [d for d in self.node.fleet.living(self.node.fleet.ids()) if d not in self.left]

    def _heard(self, m: Message) -> None:
        """Take note of a device that has come back, or has gone again."""
        if isinstance(m, Leaving):
            self.left.add(m.sender)
        else:
            self.left.discard(m.sender)

    async def _all_done(self, told: Resume) -> bool:
        """Wait for all members to end, at one step; False when that cannot be, or could go faster."""
        node, plan = self.node, plan_of(told)
        waiting, steps = set(plan.members), set()
        while waiting:
            done = node.receive(Done, Gone, sender=plan.members, attempt=told.attempt)
            m: Any = await node.first(done, node.receive(Back, Here, Leaving))
            if isinstance(m, Done):
                waiting.discard(m.sender)
                steps.add(m.step)
                continue
            if not isinstance(m, Gone):
                self._heard(m)
            if isinstance(m, Gone) or m.sender in plan.members:
                return False
            if plan_for_living(node, self.policies, self._living()) not in (None, plan):
                return False
            if not isinstance(m, Leaving):
                node.send(m.sender, told)  # there is nothing for it to do
        assert len(steps) == 1, f"stages ended at steps {sorted(steps)}"
        return True

    async def _assemble(self) -> Resume:
        """Call all who live, until they can go on: how."""
        node, waits = self.node, False
        while True:
            for m in node.take(Back, Here, Leaving):
                self._heard(m)
            positions = await self._positions()
            if positions is None:
                continue
            plan = plan_for_living(node, self.policies, sorted(positions))
            found = None if plan is None else self._arranged(plan, positions)
            if found is not None:
                return found
            if not waits:
                node.note("waiting", self._until(positions))
                waits = True
            self._heard(await node.receive(Back, Here, Leaving))

    async def _positions(self) -> dict[int, Position] | None:
        """Where all are who live; None where one of them went, or another came."""
        living = self._living()
        self.attempt = (self.node.life, self.attempt[1] + 1)
        self.node.send(living, Called(self.attempt))
        positions: dict[int, Position] = {}
        while len(positions) < len(living):
            news: Any = (Position, Gone, Back, Leaving)
            m = await self.node.receive(*news, sender=living, attempt=self.attempt)
            if not isinstance(m, Position):
                if not isinstance(m, Gone):
                    self._heard(m)
                return None
            positions[m.sender] = m
        return positions

    # --- where to go on -----------------------------------------------------------------------------------

    def _arranged(self, plan: PipelinePlan, positions: dict[int, Position]) -> Resume | None:
        """Where the devices can go on with a plan, and who hands what to whom; None: nowhere yet."""
        known = max(p.known for p in positions.values())
        line = tuple(sorted(d for d, p in positions.items() if p.known == known))
        # Those who took part last first; of the others, who did so latest.
        order = sorted(positions, key=lambda d: ([-n for n in positions[d].known], d))
        every = self.node.config.copy_every
        least = max(p.step for p in positions.values()) - (1 if every is None else every + 2)
        steps = {step for p in positions.values() for _, _, step in p.held} | {0}
        for step in sorted((s for s in steps if s >= least), reverse=True):
            if step == 0:
                return resume(plan, self.attempt, 0, line=line)
            holders = [self._holder(b, step, order, positions) for b in range(plan.stages[-1].last)]
            if None not in holders:
                moves = self._moves(plan, step, holders, positions, line)
                return resume(plan, self.attempt, step, moves=moves, line=line)
        return None

    @staticmethod
    def _holder(b: int, step: int, order: Sequence[int], positions: dict[int, Position]) -> int | None:
        """The first device in order that holds a block after so many steps."""
        return next((d for d in order if _holds(positions[d], b, step)), None)

    @staticmethod
    def _moves(
        plan: PipelinePlan,
        step: int,
        holders: Sequence[int | None],
        positions: dict[int, Position],
        line: Sequence[int],
    ) -> tuple[tuple[int, int, int, int], ...]:
        """(from, to, first block, last block): consecutive blocks that a device of the plan lacks."""
        moves = []
        for stage in plan.stages:
            for d in stage.devices:
                blocks = range(stage.first, stage.last)
                own = [d in line and _holds(positions[d], b, step) for b in blocks]
                sources = [d if has else holders[b] for b, has in zip(blocks, own, strict=True)]
                at = stage.first
                for source, run in groupby(sources):
                    count = len(list(run))
                    if source is not None and source != d:
                        moves.append((source, d, at, at + count))
                    at += count
        return tuple(moves)

    # --- in words -----------------------------------------------------------------------------------------

    def _lost(self) -> list[int]:
        """The devices of the fleet's plan that are gone."""
        living = self._living()
        return [d for d in self.home.members if d not in living]

    def _why(self, plan: PipelinePlan) -> str:
        """Why the step under way is void."""
        lost = [d for d in self._lost() if d in plan.members]
        return f"the step is void: {_are(lost)} gone" if lost else "the step is void: somebody has come back"

    def _until(self, positions: dict[int, Position]) -> str:
        """For whom all wait, and which blocks they alone hold."""
        stages = [s for s in self.home.stages if not set(s.devices) & set(positions)]
        alone = [f"{s.first}:{s.last}" for s in stages]
        held = f", and nobody else holds blocks {', '.join(alone)}" if alone else ""
        return f"all wait until {_are(self._lost())} back{held}"

    def _how(self, m: Resume) -> str:
        """Where and with whom all go on."""
        lost, plan = self._lost(), plan_of(m)
        if not lost:
            return f"after {m.step} steps"
        anew = [(s.first, s.last) for s in plan.stages] != [(s.first, s.last) for s in self.home.stages]
        how = "planned anew, " if anew else ""
        return f"after {m.step} steps without {_named(lost)}: {how}{plan.describe()}"

    # --- the end ------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Tell all that the run is over. One that is lost just then is waited for only if it alone has its
        stage's end."""
        node, plan = self.node, self.member.plan or self.home
        missing = [set(stage.devices) - {node.id} for stage in plan.stages if node.id not in stage.devices]
        waiting = [d for d in self._living() if d != node.id]
        while waiting:
            told = set()
            for d, transfer in [(d, node.send(d, Over())) for d in waiting]:
                try:
                    await transfer.delivered
                    told.add(d)
                except Unreachable:
                    pass
            missing = [devices for devices in missing if not devices & told]
            waiting = sorted(set().union(*missing))
            if waiting:
                m = await node.receive(Back, sender=waiting)
                waiting = [m.sender]


def _holds(position: Position, b: int, step: int) -> bool:
    return any(first <= b < last and k == step for first, last, k in position.held)


def _named(devices: Sequence[int]) -> str:
    return ", ".join(f"peer {d}" for d in devices)


def _are(devices: Sequence[int]) -> str:
    return f"{_named(devices)} {'is' if len(devices) == 1 else 'are'}"
