"""What the pipelined methods share: a device's passes, messages between stages, and going on after a loss.

The lowest peer leads (pipeline_lead): it says who does what, and calls all when a member is gone or has come
back. Each member keeps its stage after its last two steps, since nobody can be two steps ahead of what
anybody has stored; so nobody has half of an update. With `copy_every` it keeps one version more, and copies
of its neighbours' stages: a step is stored only when the copies of the last one have come, so that those of a
step are everywhere when anybody is two steps further. Every message of a step carries the attempt (the
leader's life, a count) that it is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edgefl.data import Batch, LocalData
from edgefl.errors import PeerGone
from edgefl.learning.work import StageBackward, StageForward, StageGradient
from edgefl.messages import field_names
from edgefl.methods.split.pipeline_held import Held
from edgefl.methods.split.pipeline_lead import Leader, plan_of
from edgefl.methods.split.pipeline_messages import (
    ActivationGradients,
    Activations,
    Attempt,
    Called,
    Copied,
    Done,
    Handed,
    Here,
    Over,
    Place,
    Portion,
    Position,
    Resume,
)
from edgefl.nodes import Node, Op, Task
from edgefl.parameters import Vector
from edgefl.patterns.all_reduce import ring_all_reduce
from edgefl.patterns.cuts import Across, Link, Part
from edgefl.patterns.farewell import Leaving
from edgefl.planning.fleet import plan_for
from edgefl.planning.pipeline import PipelinePlan, Policy, overlaps

PATIENCE_ROUNDS = 10
"""A device that has come back and hears nothing for so many planned rounds asks, and after as many leaves."""


class Interrupted(Exception):
    """The step under way is void; `call` is the leader's call, None while it is yet to come."""

    def __init__(self, call: Called | None = None) -> None:
        self.call = call
        super().__init__("called off")


async def pipeline_peer(node: Node, policies: Sequence[Policy]) -> Vector | None:
    """One device's life. Returns its stage's parameters at the end, None for a device that has no stage."""
    member = Member(node, policies)
    if node.id == member.leader:
        node.start(Leader(node, policies, member).run())
    wanted: Resume | Called | Over | None = member.under_way or await member.told()
    while not isinstance(wanted, Over | None):
        try:
            if isinstance(wanted, Called):
                member.answer(wanted)
            else:
                if wanted is not member.under_way:
                    await member.begin(wanted)
                await member.run()
            wanted = await member.told()
        except Interrupted as interrupted:
            wanted = interrupted.call or await member.told()
    return member.part.parameters if member.has_ended else None


class Member:
    """A device's place in the pipeline. step: steps made; held: what it holds; known: the attempt that it
    took part in last."""

    def __init__(self, node: Node, policies: Sequence[Policy]) -> None:
        self.node, self.leader = node, node.fleet.ids()[0]
        self.data: LocalData = node.fleet.pooled_data()
        saved = node.saved or {}
        self.step: int = saved.get("step", 0)
        self.held = Held(node.model, node.optimizer, saved.get("held", ()))
        self.known: Attempt = (-1, -1)
        self.called: Attempt = (-1, -1)
        """The last call that was answered."""
        self.plan: PipelinePlan | None = None
        self.s = self.r = 0
        self.under_way: Resume | None = None
        """What was told before the last save. A new life goes on with it: where what was sent to the last one
        comes again, as over gRPC, nobody else notices; where not, the leader calls."""
        if "told" in saved:
            self.under_way = Resume(*saved["told"])
            self._take_place(self.under_way)
        self.patience_s: float | None = None
        """How long this device waits before it asks; None: it knows that the others count on it."""
        if node.life and node.id != self.leader and not self._alone:
            step_s = plan_for(node, policies).step_s
            self.patience_s = PATIENCE_ROUNDS * self._steps_per_round * step_s

    @property
    def _alone(self) -> bool:
        """Whether the others cannot have gone on without it."""
        if self.plan is None or self.node.config.copy_every is not None or self.step < 2:
            return False
        return self.has_stage and len(self.plan.stages[self.s].devices) == 1

    @property
    def has_stage(self) -> bool:
        return self.plan is not None and self.plan.place(self.node.id) is not None

    @property
    def part(self) -> Part:
        return self.held[self.first, self.last, self.step]

    @property
    def has_ended(self) -> bool:
        """Whether it has a stage, and that has made all steps."""
        return self.has_stage and self._is_last_step

    @property
    def _is_last_step(self) -> bool:
        rounds = self.node.num_rounds
        return rounds is not None and self.step >= rounds * self._steps_per_round

    @property
    def _steps_per_round(self) -> int:
        return self.node.workload.num_steps(len(self.data))

    def _round(self, step: int) -> int:
        return step // self._steps_per_round

    # --- with the leader ------------------------------------------------------------------------------

    async def told(self) -> Resume | Called | Over | None:
        """What the leader says next. None: it says nothing to a device that was away; it must have ended."""
        has_asked = False
        while True:
            m: Any = await self.node.receive(Resume, Called, Over, timeout_s=self.patience_s)
            if isinstance(m, Over) or (m is not None and not self._is_old(m)):
                self.patience_s = None
                return m
            if m is None and self.node.fleet.alive(self.leader):
                if has_asked:
                    self.node.send(self.leader, Leaving())
                    return None
                self.node.send(self.leader, Here())
                has_asked = True

    def _is_old(self, m: Resume | Called) -> bool:
        """Whether the leader has said something else since: kinds may overtake each other."""
        return m.attempt <= self.known if isinstance(m, Called) else m.attempt < max(self.called, self.known)

    def answer(self, m: Called) -> None:
        """Say where this device is."""
        self.called = m.attempt
        self.node.send(self.leader, Position(m.attempt, self.step, self.known, tuple(self.held.parts)))

    async def _unless_called(self, op: Op[Any] | Task[Any]) -> Any:
        """Wait for it. Raises Interrupted when the leader calls, or a device that was away hears nothing."""
        while True:
            came = await self.node.first(op, self.node.receive(Called), timeout_s=self.patience_s)
            if came is None:
                raise Interrupted()
            if not isinstance(came, Called):
                return came
            if not self._is_old(came):
                raise Interrupted(came)

    async def begin(self, m: Resume) -> None:
        """Hand on and take over blocks, and be where the leader wants everybody to be."""
        node, me = self.node, self.node.id
        given = [(to, first, last) for source, to, first, last in m.moves if source == me]
        for to, first, last in given:
            part = self.held.piece(first, last, m.step)
            node.send(to, Handed(m.attempt, m.step, first, last, part.parameters, part.state))
        came: list[Portion] = []
        for source, to, first, _ in m.moves:
            if to == me:
                handed = node.receive(Handed, sender=source, turn=m.attempt, first=first)
                came.append(await self._unless_called(handed))
        # Nothing has changed up to here, and nothing waits below.
        self._take_place(m)
        self.step, held = m.step, self.held
        own = held.piece(self.first, self.last, m.step, came) if self.has_stage else None
        if me in m.line:
            oldest = m.step if node.config.copy_every is None else 0
            held.keep(lambda place: oldest <= place[2] <= m.step)
        else:
            held.parts = {(a, b, m.step): held.piece(a, b, m.step) for _, a, b in given}
        if own is None:
            return
        held[self.first, self.last, m.step] = own
        if self.r == 0:
            node.publish(own.parameters, step=self._round(self.step), part=self.name)
        if m.step:
            await node.store(**self.state())  # before those who have handed on something give it up

    def _take_place(self, m: Resume) -> None:
        """Know the plan, and this device's place in it."""
        self.plan, self.known, self._told = plan_of(m), m.attempt, m
        place = self.plan.place(self.node.id)
        if place is None:
            return
        self.s, self.r = place
        mine = self.plan.stages[self.s]
        self.first, self.last, self.name = mine.first, mine.last, f"{mine.first}:{mine.last}"
        self.stage, self.is_last = self.node.model.stage(mine.first, mine.last), mine is self.plan.stages[-1]

    def state(self) -> dict[str, Any]:
        """What this device goes on from: its step, what it holds, and what it was told."""
        found: dict[str, Any] = {"step": self.step, "held": self.held.saved()}
        if self.plan is not None:
            told = self._told
            found["told"] = tuple(getattr(told, name) for name in field_names(type(told)))
        return found

    # --- steps ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """All steps that are left, and word of the end. Raises Interrupted when the leader calls."""
        node = self.node
        if not self.has_stage:
            return
        while not self._is_last_step:
            k, began_s = self.step, node.now()
            self._send_copies(k)
            gradient = await self._passes(k)
            part = self.part.stepped(node, await self._reduced(gradient, k), self._round(k))
            await self._take_copies(k)
            self.held[self.first, self.last, k + 1] = part
            self.step = k + 1
            self._forget()
            node.record(step_s=node.now() - began_s, in_flight=self.most_open)
            if self.r == 0 and self.step % self._steps_per_round == 0:
                node.publish(part.parameters, step=self._round(self.step), part=self.name)
            await node.store(**self.state())  # before anything of the next step is sent
            self.patience_s = None
        node.send(self.leader, Done(self.known, self.step))

    def _forget(self) -> None:
        """Drop what nobody can go back to any more.

        Not before two steps of an attempt: then all have stored what they began it with, and copies of that.
        """
        base, every = self._told.step, self.node.config.copy_every
        since = self.step - base
        if since < 2:
            return
        copied = self.step if every is None else base + every * ((since - 2) // every)
        mine, wards = (self.first, self.last), self._wards

        def wanted(place: Place) -> bool:
            *blocks, step = place
            if tuple(blocks) == mine:
                return step in (self.step, self.step - 1, copied)
            return tuple(blocks) in wards and step >= copied

        self.held.keep(wanted)

    # --- copies ---------------------------------------------------------------------------------------

    def _is_copied(self, step: int) -> bool:
        """Whether copies are made of the stages after so many steps."""
        every = self.node.config.copy_every
        return every is not None and step > 0 and (step - self._told.step) % every == 0

    @property
    def _wards(self) -> dict[tuple[int, int], int]:
        """The stages of which this device keeps copies, by their blocks: whose they are."""
        assert self.plan is not None
        kept = [d for d, keeper in self.plan.keepers.items() if keeper == self.node.id]
        stages = [(self.plan.stages[place[0]], d) for d in kept if (place := self.plan.place(d))]
        return {(stage.first, stage.last): d for stage, d in stages}

    def _send_copies(self, step: int) -> None:
        """Send this device's stage to whoever keeps copies of it, where it is time."""
        assert self.plan is not None
        keeper = self.plan.keepers.get(self.node.id)
        if keeper is not None and self._is_copied(step):
            part = self.part
            copy = Copied(self.known, step, self.first, self.last, part.parameters, part.state)
            self.node.send(keeper, copy)

    async def _take_copies(self, step: int) -> None:
        """Hold the copies that neighbours have made of their stages after so many steps."""
        if self._is_copied(step):
            for ward in self._wards.values():
                copied = self.node.receive(Copied, sender=ward, turn=self.known, step=step)
                self.held.take(await self._unless_called(copied))

    # --- passes ---------------------------------------------------------------------------------------

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
            work = self.node.start(self._ring(ring, gradient, k))
            try:
                await self._unless_called(work)
            except Interrupted:
                work.cancel()
                raise
            if work.value is None:
                raise Interrupted()
            gradient = work.value
        return self.part.parameters.with_values(gradient)

    async def _ring(self, ring: Sequence[int], gradient: Tensor, k: int) -> Tensor | None:
        """The sum around a ring; None when a member is gone: an error would end the leader beside it."""
        life, count = self.known
        try:
            return await ring_all_reduce(self.node, ring, gradient, tag=(life << 20 | count) << 32 | k)
        except PeerGone:
            return None

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
            link = Link(to, self.known, self.node.config.packing)
            link.send(self.node, kind, k * self.plan.num_micro + m, values[begin - first : end - first])

    async def _gathered(self, kind: type[Across], k: int, m: int, other: int, size: int) -> Tensor:
        """This replica's rows, from those of another stage. Raises Interrupted when the leader calls."""
        assert self.plan is not None
        parts = []
        for sender, _, _ in self._shared(other, size):
            number = k * self.plan.num_micro + m
            wanted = self.node.receive(kind, sender=sender, turn=self.known, step=number)
            parts.append((await self._unless_called(wanted)).tensor())
        return parts[0] if len(parts) == 1 else torch.cat(parts)
