"""What the pipelined methods share: a device's passes, messages between stages, and going on after a loss.

The lowest peer leads: it plans, tells all, and watches over them. When a member is gone or has come back, the
step under way is void. The leader waits until all live, asks each how many steps it has made, and lets all
go on from the lowest: each member keeps its last two versions, since nobody can be two steps ahead of what
anybody has stored. Every message of a step carries the attempt (the leader's life, a count) that it is of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from edgefl.data import Batch, LocalData
from edgefl.errors import PeerGone, Unreachable
from edgefl.learning.work import StageBackward, StageForward, StageGradient
from edgefl.methods.split.pipeline_messages import (
    ActivationGradients,
    Activations,
    Attempt,
    Called,
    Done,
    Over,
    Position,
    Resume,
)
from edgefl.nodes import Back, Gone, Node
from edgefl.parameters import Vector
from edgefl.patterns.all_reduce import ring_all_reduce
from edgefl.patterns.cuts import Across, Link, Part
from edgefl.planning.pipeline import PipelinePlan, Stage, overlaps


class Interrupted(Exception):
    """The step under way is void; `call` is the leader's call, None while it is yet to come."""

    def __init__(self, call: Called | None = None) -> None:
        self.call = call
        super().__init__("called off")


async def pipeline_peer(node: Node, make_plan: Callable[[Node], PipelinePlan]) -> Vector | None:
    """One device's life. Returns its stage's parameters at the end, None for a device that has no stage."""
    peers = node.fleet.ids()
    member = Member(node)
    if node.id == peers[0]:
        node.start(_lead(node, make_plan(node), member))
    wanted: Any = member.under_way or await node.receive(Resume, Called, Over)
    while not isinstance(wanted, Over):
        if isinstance(wanted, Called):
            node.send(peers[0], Position(wanted.attempt, member.step))
            wanted = await node.receive(Resume, Called, Over)
            continue
        if not member.begin(wanted):
            if node.id == peers[0]:
                await node.receive(Over)  # the leader is needed to the end
            return None
        try:
            await member.run()
            node.send(peers[0], Done(wanted.attempt, member.step))
            wanted = await node.receive(Called, Over)
        except Interrupted as interrupted:
            wanted = interrupted.call or await node.receive(Called)
    return member.part.parameters if member.versions else None


# --- the leader -------------------------------------------------------------------------------------------


async def _lead(node: Node, plan: PipelinePlan, member: Member) -> None:
    """Start all members, call them together when one is lost or back, and end the run when all are done.

    That all are done is saved with this member's state: a leader that is lost while it ends the run would
    else call members that have left.
    """
    attempt, step = (node.life, 0), 0
    spares = [j for j in node.fleet.ids() if j not in plan.members]
    if spares:
        node.send(spares, _resume(plan, attempt, step))
        node.start(_dismiss(node, spares))
    over = bool(node.saved and node.saved.get("over"))
    if node.life and not over:
        attempt, step = await _assemble(node, plan, attempt)
    while not over:
        node.send(plan.members, _resume(plan, attempt, step))
        if await _all_done(node, plan, attempt):
            await node.save(over=True, **member.state())
            break
        node.note("stopped", _why(node, plan))
        attempt, step = await _assemble(node, plan, attempt)
        node.note("resumed", f"after {step} steps")
    await _end(node, [j for j in plan.members if j != node.id])
    node.send(node.id, Over())


def _lost(node: Node, plan: PipelinePlan) -> list[int]:
    """The members of the pipeline that are gone."""
    return [d for d in plan.members if not node.fleet.alive(d)]


def _why(node: Node, plan: PipelinePlan) -> str:
    """Why the step under way is void: who is lost, and which blocks nobody else holds."""
    lost = _lost(node, plan)
    if not lost:
        return "a member of the pipeline has come back; its step is void"
    alone = [f"{s.first}:{s.last}" for s in plan.stages if set(s.devices) <= set(lost)]
    held = f", and nobody else holds blocks {', '.join(alone)}" if alone else ""
    return f"the step is void until {', '.join(f'peer {d}' for d in lost)} is back{held}"


async def _dismiss(node: Node, spares: Sequence[int]) -> None:
    """Tell devices without a stage that come back that there is nothing for them to do."""
    while True:
        m = await node.receive(Back, sender=spares)
        node.send(m.sender, Over())


async def _end(node: Node, members: Sequence[int]) -> None:
    """Tell all members that the run is over; one that is lost just then, when it is back."""
    waiting = list(members)
    while waiting:
        lost = []
        for j, transfer in [(j, node.send(j, Over())) for j in waiting]:
            try:
                await transfer.delivered
            except Unreachable:
                lost.append(j)
        waiting = lost
        if waiting:
            await node.receive(Back, sender=waiting)


def _resume(plan: PipelinePlan, attempt: Attempt, step: int) -> Resume:
    stages = tuple((s.first, s.last, s.devices, s.shares) for s in plan.stages)
    return Resume(attempt, step, stages, plan.batch, plan.num_micro, plan.policy, plan.warmup, plan.chunk)


def _fields(m: Resume) -> tuple[Any, ...]:
    """What says the plan, as it can be saved."""
    return m.stages, m.batch, m.num_micro, m.policy, m.warmup, m.chunk


def _plan_of(m: Resume) -> PipelinePlan:
    policy: Any = m.policy
    stages = tuple(Stage(*stage) for stage in m.stages)
    return PipelinePlan(stages, m.batch, m.num_micro, policy, m.warmup, m.chunk)


async def _all_done(node: Node, plan: PipelinePlan, attempt: Attempt) -> bool:
    """Wait for all members to end, at one step; False when one is lost or has come back."""
    waiting, steps = set(plan.members), set()
    while waiting:
        m = await node.receive(Done, Gone, Back, sender=plan.members, attempt=attempt)
        if not isinstance(m, Done):
            return False
        waiting.discard(m.sender)
        steps.add(m.step)
    assert len(steps) == 1, f"stages ended at steps {sorted(steps)}"
    return True


async def _assemble(node: Node, plan: PipelinePlan, attempt: Attempt) -> tuple[Attempt, int]:
    """Wait until all members live, and for the steps that each has made: the new attempt, and the lowest."""
    while True:
        while lost := _lost(node, plan):
            await node.receive(Back, sender=lost)
        node.take(Back)
        attempt = (node.life, attempt[1] + 1)
        node.send(plan.members, Called(attempt))
        steps: dict[int, int] = {}
        while len(steps) < len(plan.members):
            m = await node.receive(Position, Gone, Back, sender=plan.members, attempt=attempt)
            if not isinstance(m, Position):
                break
            steps[m.sender] = m.step
        else:
            return attempt, min(steps.values())


# --- a member ---------------------------------------------------------------------------------------------


class Member:
    """A device's stage: its last two versions, and its passes. step: steps made; part: after so many."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.plan: PipelinePlan | None = None
        saved = node.saved or {"step": 0}
        self.step: int = saved["step"]
        self.versions: dict[int, Part] = {}
        for back, name in enumerate(("part", "older")):
            if name in saved:
                self.versions[self.step - back] = Part(saved[name], saved[f"{name}_state"])
        self.under_way: Resume | None = None
        """What was told before the last save. A new life goes on with it: where what was sent to the last one
        comes again, as over gRPC, nobody else notices; where not, the leader calls."""
        if "attempt" in saved:
            self.under_way = Resume(saved["attempt"], self.step, *saved["plan"])
        self.data: LocalData = node.fleet.pooled_data()

    @property
    def part(self) -> Part:
        return self.versions[self.step]

    def begin(self, m: Resume) -> bool:
        """Be where the leader wants everybody to be; False for a device without a stage."""
        node, model = self.node, self.node.model
        self.plan, self.attempt, self.told = _plan_of(m), m.attempt, m
        place = self.plan.place(node.id)
        if place is None:
            return False
        self.s, self.r = place
        mine = self.plan.stages[self.s]
        self.stage, self.is_last = model.stage(mine.first, mine.last), self.s == len(self.plan.stages) - 1
        if not self.versions:
            self.versions[0] = Part(model.cut(model.init(), mine.first, mine.last))
        self.step = m.step
        self.name = f"{mine.first}:{mine.last}"
        if self.r == 0:
            node.publish(self.part.parameters, step=self._round(self.step), part=self.name)
        return True

    @property
    def _steps_per_round(self) -> int:
        return self.node.workload.num_steps(len(self.data))

    def _round(self, step: int) -> int:
        return step // self._steps_per_round

    async def run(self) -> None:
        """All steps that are left. Raises Interrupted when the leader calls."""
        node, rounds = self.node, self.node.num_rounds
        while rounds is None or self.step < rounds * self._steps_per_round:
            k, began_s = self.step, node.now()
            gradient = await self._passes(k)
            part = self.part.stepped(node, await self._reduced(gradient, k), self._round(k))
            self.versions = {k: self.part, k + 1: part}
            self.step = k + 1
            node.record(step_s=node.now() - began_s, in_flight=self.most_open)
            if self.r == 0 and self.step % self._steps_per_round == 0:
                node.publish(part.parameters, step=self._round(self.step), part=self.name)
            await node.store(**self.state())  # before anything of the next step is sent

    def state(self) -> dict[str, Any]:
        """What this member goes on from: its step, its versions, and what it was told."""
        if self.step not in self.versions or self.plan is None:
            return {"step": self.step}
        found: dict[str, Any] = {"step": self.step, "attempt": self.attempt, "plan": _fields(self.told)}
        for back, name in enumerate(("part", "older")):
            if (version := self.versions.get(self.step - back)) is not None:
                found |= {name: version.parameters, f"{name}_state": version.state}
        return found

    async def _passes(self, k: int) -> Tensor:
        """All passes of step k in order; the gradient of the batch's mean loss, from this replica's rows."""
        assert self.plan is not None
        batch = self.data.batch(k, self.node.workload.batch_size)
        bounds = self.plan.micro_bounds(len(batch))
        total, self.most_open, losses = torch.zeros_like(self.part.parameters.values), 0, 0.0
        inputs: dict[int, Tensor] = {}
        for kind, m in self.plan.order(self.s):
            begin, end = bounds[m]
            rows = self.plan.stages[self.s].rows(end - begin)[self.r]
            if rows[0] == rows[1]:
                continue
            micro = Batch(batch.x[begin:end], batch.y[begin:end])
            if kind == "F":
                inputs[m] = await self._forward(k, m, micro, rows)
                self.most_open = max(self.most_open, len(inputs))
                assert self.most_open <= self.plan.warmup[self.s], "more open passes than the schedule has"
                continue
            g = await self._backward(k, m, micro, rows, inputs.pop(m), len(batch))
            total += g.parameters.values
            losses += g.loss or 0.0
        if self.is_last:
            self.node.record(train_loss=losses)
        return total

    async def _forward(self, k: int, m: int, micro: Batch, rows: tuple[int, int]) -> Tensor:
        """The input of a micro-batch's rows; its output is on its way down."""
        x = micro.x[rows[0] : rows[1]]
        if self.s:
            x = await self._gathered(Activations, k, m, self.s - 1, len(micro))
        keep = not self.node.config.recompute
        output: Tensor = await self.node.compute(StageForward(self.stage, self.part.parameters, x, keep=keep))
        if not self.is_last:
            self._scatter(Activations, k, m, self.s + 1, len(micro), output)
        return x

    async def _backward(
        self, k: int, m: int, micro: Batch, rows: tuple[int, int], x: Tensor, batch_size: int
    ) -> StageGradient:
        """The gradients of a micro-batch's rows, as shares of the batch's mean; that at x goes up."""
        parameters, wants, kept = self.part.parameters, self.s > 0, not self.node.config.recompute
        if not self.is_last:
            gradient = await self._gathered(ActivationGradients, k, m, self.s + 1, len(micro))
            work = StageBackward(
                self.stage, parameters, x, output_gradient=gradient, input_gradient=wants, kept=kept
            )
            g: StageGradient = await self.node.compute(work)
        else:
            y = micro.y[rows[0] : rows[1]]
            work = StageBackward(self.stage, parameters, x, labels=y, input_gradient=wants, kept=kept)
            mean: StageGradient = await self.node.compute(work)
            share = len(x) / batch_size  # B_i / B
            assert mean.loss is not None
            upward = None if mean.input is None else mean.input * share
            g = StageGradient(mean.parameters * share, upward, mean.loss * share)
        if g.input is not None:
            self._scatter(ActivationGradients, k, m, self.s - 1, len(micro), g.input)
        return g

    async def _reduced(self, gradient: Tensor, k: int) -> Vector:
        """The gradient summed over the replicas of the stage."""
        assert self.plan is not None
        ring = self.plan.stages[self.s].devices
        if len(ring) > 1:
            life, count = self.attempt
            tag = (life << 20 | count) << 32 | k
            work = self.node.start(ring_all_reduce(self.node, ring, gradient, tag=tag))
            try:
                came = await self.node.first(self.node.receive(Called), work)
            except PeerGone:
                raise Interrupted() from None
            if came is not work:
                work.cancel()
                raise Interrupted(came)
            gradient = work.value
        return self.part.parameters.with_values(gradient)

    # --- between stages -------------------------------------------------------------------------------

    def _shared(self, other: int, size: int) -> list[tuple[int, int, int]]:
        """(device, begin, end): the rows of a micro-batch that this replica shares with another stage's."""
        assert self.plan is not None
        stages = self.plan.stages
        found = overlaps(stages[other].rows(size), stages[self.s].rows(size))
        return [(stages[other].devices[i], begin, end) for i, j, begin, end in found if j == self.r]

    def _scatter(self, kind: type[Across], k: int, m: int, other: int, size: int, values: Tensor) -> None:
        """Send each replica of another stage the rows that both hold."""
        assert self.plan is not None
        first = self.plan.stages[self.s].rows(size)[self.r][0]
        for to, begin, end in self._shared(other, size):
            link = Link(to, self.attempt, self.node.config.packing)
            link.send(self.node, kind, k * self.plan.num_micro + m, values[begin - first : end - first])

    async def _gathered(self, kind: type[Across], k: int, m: int, other: int, size: int) -> Tensor:
        """This replica's rows, from those of another stage. Raises Interrupted when the leader calls."""
        assert self.plan is not None
        parts = []
        for sender, _, _ in self._shared(other, size):
            number = k * self.plan.num_micro + m
            wanted = self.node.receive(kind, sender=sender, turn=self.attempt, step=number)
            came: Any = await self.node.first(wanted, self.node.receive(Called))
            if isinstance(came, Called):
                raise Interrupted(came)
            parts.append(came.tensor())
        return parts[0] if len(parts) == 1 else torch.cat(parts)
