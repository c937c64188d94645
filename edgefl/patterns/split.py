"""Training a model in parts that exchange activations and their gradients: what split methods share.

A client holds the front (blocks 0 .. cut - 1) and the examples, a server the rear. Per batch: the client
runs the front and sends the smashed data with the labels; the server runs the rear, takes the loss and its
own step, and returns the gradient at the cut; the client goes back through the front and takes its step.
The forward pass of the front is kept until then. Labels travel as 32-bit integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from edgefl.data import Batch
from edgefl.learning.model import Model
from edgefl.learning.work import StageBackward, StageForward, StageGradient, Work
from edgefl.nodes import Back, Gone, Message, MethodConfig, Node, Task
from edgefl.parameters import Vector, WeightedMean
from edgefl.parameters.crossing import WHOLE, Packing, unpacked

State = tuple[Tensor, ...] | None
Turn = tuple[int, int]
"""(the server's life, round): answers to a server that has been restarted since are void."""
T = TypeVar("T")
M = TypeVar("M", bound=Message)


class CutConfig(MethodConfig):
    """What crosses the cut (its relative error is recorded as cut_error); the rest is [train]'s."""

    cut_bits: Literal[32, 8] = 32
    """Bits per value at the cut. 8: rounded by keyed chance, unbiased, on a scale per 512 values."""
    cut_keep: float = Field(default=1.0, gt=0, le=1)
    """Share of the values that cross, those of largest magnitude, with 32 bits; the others arrive as 0."""
    cut_noise: float = Field(default=0.0, ge=0)
    """Standard deviation of the normal noise that a client adds to its smashed data, on their own scale."""

    @property
    def packing(self) -> Packing:
        return Packing(self.cut_bits, self.cut_keep, self.cut_noise)

    @model_validator(mode="after")
    def _one_way_to_be_small(self) -> Self:
        if self.cut_bits == 8 and self.cut_keep < 1:
            raise ValueError("cut_keep below 1 goes with cut_bits = 32")
        return self


class OneCutConfig(CutConfig):
    """One cut for all clients."""

    cut: int = Field(default=1, ge=1)
    """Blocks at the front, on the client."""


@dataclass(frozen=True)
class Across(Message):
    """What crosses a cut for one batch. values: a tensor of this shape, packed.

    A sender that goes through its turn again, after it was restarted, says the same again.
    """

    stale_by = "turn"
    once_by = ("sender", "turn", "step")
    noisy: ClassVar[bool] = False
    """Leaves a client, and takes the noise that is asked for."""
    turn: tuple[int, int]
    step: int
    shape: tuple[int, ...]
    values: tuple[Tensor, ...]

    def tensor(self) -> Tensor:
        """The tensor that crossed. Raises ValueError for values that do not fit the shape."""
        if len(self.values) == 1:
            return self.values[0].view(self.shape)
        return unpacked(self.values, math.prod(self.shape)).view(self.shape)


@dataclass(frozen=True)
class SmashedData(Across):
    """The front's output for a batch, and the labels where they are shared."""

    noisy = True
    labels: Tensor | None = None


@dataclass(frozen=True)
class SmashedGradient(Across):
    """The gradient of the batch's mean loss at the cut."""


@dataclass(frozen=True)
class Front(Message):
    """A turn: the front of the model for a client to train.

    parameters: None where the client goes on with its own front. state: the optimiser's, fresh where None.
    returns: what is to come back at the end. rate_bytes_per_s: paces what the client sends.
    """

    stale_by = "turn"
    turn: tuple[int, int]
    cut: int
    parameters: Vector | None
    state: tuple[Tensor, ...] | None = None
    returns: str = "parameters"
    rate_bytes_per_s: float | None = None


@dataclass(frozen=True)
class FrontBack(Message):
    """The end of a client's turn: its front, None where it stays.

    loss: mean over its batches, where the client takes it. busy_s: seconds that their work has taken.
    """

    stale_by = "turn"
    once_by = ("sender", "turn")
    turn: tuple[int, int]
    parameters: Vector | None
    state: tuple[Tensor, ...] | None
    loss: float | None
    busy_s: float


@dataclass(frozen=True)
class Part:
    """A part of a model with its optimiser's state: a value."""

    parameters: Vector
    state: State = None

    def stepped(self, node: Node, gradient: Vector, round: int) -> Part:
        """One step of [train]'s optimiser at the rate of `round`."""
        return Part(*node.optimizer.step(self.parameters, gradient, self.state, round))


@dataclass(frozen=True)
class Link:
    """One end of a cut in one turn: to whom, how tensors are packed, at what rate (None: as it comes)."""

    to: int
    turn: Turn
    packing: Packing = WHOLE
    rate_bytes_per_s: float | None = None

    @property
    def round(self) -> int:
        return self.turn[1]

    def send(self, node: Node, kind: type[Across], step: int, values: Tensor, **more: Any) -> None:
        """Send a tensor across the cut; record its relative error where it has one."""
        node.send(
            self.to, crossing(node, kind, self, step, values, **more), rate_bytes_per_s=self.rate_bytes_per_s
        )


def crossing(node: Node, kind: type[Across], link: Link, step: int, values: Tensor, **more: Any) -> Across:
    """The message of a tensor that crosses a cut."""
    shape = tuple(values.shape)
    packing = link.packing if kind.noisy else replace(link.packing, noise=0.0)
    if packing.exact:
        return kind(link.turn, step, shape, (values,), **more)
    rng = node.rng(f"cut {kind.__name__}", link.to, *link.turn, step)
    message = kind(link.turn, step, shape, packing.pack(values, rng), **more)
    size = float(torch.linalg.vector_norm(values))
    node.record(cut_error=float(torch.linalg.vector_norm(message.tensor() - values)) / size if size else 0.0)
    return message


def shared_labels(batch: Batch) -> Tensor:
    """Labels as they travel: integers in 32 bits."""
    return batch.y if batch.y.is_floating_point() else batch.y.to(torch.int32)


def received_labels(labels: Tensor) -> Tensor:
    """Labels as losses take them: integers in 64 bits."""
    return labels if labels.is_floating_point() else labels.to(torch.int64)


def steps_of(node: Node, round: int) -> range:
    """The steps of this node's stream of batches that belong to a round."""
    assert node.data is not None
    n = node.workload.num_steps(len(node.data))
    return range(round * n, (round + 1) * n)


class FrontTurn:
    """A client's side of one turn: its steps of the round on the front that it was given.

    part: the front as it is now, None at cut 0, where the examples themselves cross. busy_s: seconds that its
    work has taken. losses: of batches whose loss is taken here.
    """

    def __init__(self, node: Node, m: Front, front: Part | None, packing: Packing) -> None:
        self.node, self.m, self.part = node, m, front
        self.link = Link(m.sender, m.turn, packing, m.rate_bytes_per_s)
        self.stage = node.model.stage(0, m.cut) if m.cut else None
        self.whole = m.cut == len(node.model.blocks)
        self.busy_s = 0.0
        self.losses: list[float] = []

    async def run(self) -> FrontBack:
        """All steps; returns what goes back to the server."""
        assert self.node.data is not None
        for step in steps_of(self.node, self.link.round):
            batch = self.node.data.batch(step, self.node.workload.batch_size)
            await (self.whole_step(batch) if self.whole else self.step(batch, step))
        m, part = self.m, None if self.m.returns == "nothing" else self.part
        state = part.state if part is not None and m.returns == "parameters and state" else None
        loss = mean_of(self.losses) if self.losses else None
        return FrontBack(m.turn, None if part is None else part.parameters, state, loss, self.busy_s)

    async def step(self, batch: Batch, step: int) -> None:
        """One batch across the cut, its labels with it."""
        smashed = await self.forward(batch)
        self.link.send(self.node, SmashedData, step, smashed, labels=shared_labels(batch))
        await self.backward(batch, step)

    async def whole_step(self, batch: Batch) -> None:
        """One batch where nothing is cut off."""
        assert self.part is not None and self.stage is not None
        x, y = batch.x, batch.y
        work = StageBackward(self.stage, self.part.parameters, x, labels=y, input_gradient=False)
        g: StageGradient = await self.compute(work)
        assert g.loss is not None
        self.losses.append(g.loss)
        self.part = self.part.stepped(self.node, g.parameters, self.link.round)

    async def forward(self, batch: Batch) -> Tensor:
        """The smashed data of a batch."""
        if self.part is None or self.stage is None:
            return batch.x
        smashed: Tensor = await self.compute(
            StageForward(self.stage, self.part.parameters, batch.x, keep=True)
        )
        return smashed

    async def backward(self, batch: Batch, step: int) -> None:
        """Wait for the gradient at the cut, go back through the front, and take its step."""
        link, part = self.link, self.part
        m = await self.node.receive(SmashedGradient, sender=link.to, turn=link.turn, step=step)
        if part is None or self.stage is None:
            return
        work = StageBackward(
            self.stage, part.parameters, batch.x,
            output_gradient=m.tensor(), input_gradient=False, kept=True,
        )  # fmt: skip
        g: StageGradient = await self.compute(work)
        self.part = part.stepped(self.node, g.parameters, link.round)

    async def compute(self, work: Work) -> Any:
        """Have it done, and count the seconds."""
        began_s = self.node.now()
        result = await self.node.compute(work)
        self.busy_s += self.node.now() - began_s
        return result


async def serve_turns(
    node: Node,
    kind: type[M],
    handle: Callable[[Node, M, dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]],
) -> None:
    """A client's life: handle each turn, and save what the handling returns; a newer turn ends an older one.

    kind: the message that a turn begins with. handle: given the node, the message and what was saved last;
    it sends the answer itself.
    """
    saved = dict(node.saved or {})
    m = await node.receive(kind)
    while True:
        work = node.start(handle(node, m, saved))
        newer: Any = await node.first(node.receive(kind), work)
        if newer is work:
            saved = work.value
            await node.save(**saved)
            m = await node.receive(kind)
        else:
            work.cancel()
            m = newer


async def shared_front(node: Node, m: Front, saved: dict[str, Any]) -> dict[str, Any]:
    """A turn on a front that comes with it: nothing stays at the client."""
    assert m.parameters is not None
    turn = FrontTurn(node, m, Part(m.parameters, m.state), node.config.packing)
    node.send(m.sender, await turn.run(), rate_bytes_per_s=m.rate_bytes_per_s)
    return {}


# --- the server's side ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """What a client's turn came to. rear: None where nothing was cut off. loss: mean over its batches."""

    back: FrontBack
    rear: Part | None
    loss: float


class RearTurn:
    """The server's side of one client's turn, on a rear of the client's own. share: of the processor."""

    def __init__(
        self, node: Node, link: Link, cut: int, rear: Part | None, share: float | None = None
    ) -> None:
        self.node, self.link, self.rear, self.share = node, link, rear, share
        last = len(node.model.blocks)
        self.stage = node.model.stage(cut, last) if cut < last else None
        self.losses: list[float] = []

    async def run(self) -> Served | None:
        """Serve the client until its turn is over; None when it is gone, or came back without a memory."""
        while True:
            m = await self.node.receive(
                SmashedData, FrontBack, Gone, Back, sender=self.link.to, turn=self.link.turn
            )
            if isinstance(m, FrontBack):
                return Served(m, self.rear, mean_of(self.losses) if m.loss is None else m.loss)
            if not isinstance(m, SmashedData):
                return None
            await self.step(m)

    async def step(self, m: SmashedData) -> None:
        """One batch: loss, step, and the gradient at the cut."""
        assert self.stage is not None and self.rear is not None
        g = await rear_gradient(self.node, self.stage, self.rear, m, self.share)
        assert g.input is not None and g.loss is not None
        self.rear = self.rear.stepped(self.node, g.parameters, self.link.round)
        self.losses.append(g.loss)
        self.link.send(self.node, SmashedGradient, m.step, g.input)


async def rear_gradient(
    node: Node, stage: Model, rear: Part, m: SmashedData, share: float | None = None
) -> StageGradient:
    """Loss and gradients of a batch whose labels came along. Raises ValueError when they did not."""
    if m.labels is None:
        raise ValueError("this batch came without labels")
    work = StageBackward(stage, rear.parameters, m.tensor(), labels=received_labels(m.labels))
    g: StageGradient = await node.compute(work, share=share)
    return g


def begin_turn(
    node: Node,
    link: Link,
    cut: int,
    whole: Vector,
    *,
    share: float | None = None,
    kind: type[RearTurn] = RearTurn,
) -> Task[Served | None]:
    """Send a client its front of `whole`, and serve its turn with a rear of its own beside the program."""
    model, last = node.model, len(node.model.blocks)
    rear = Part(model.cut(whole, cut, last)) if cut < last else None
    rate = link.rate_bytes_per_s
    front = Front(link.turn, cut, model.cut(whole, 0, cut), rate_bytes_per_s=rate)
    node.send(link.to, front, rate_bytes_per_s=rate)
    return node.start(kind(node, link, cut, rear, share).run())


def joined(model: Model, served: Served) -> Vector:
    """The whole model that a client's turn came to."""
    assert served.back.parameters is not None
    if served.rear is None:
        return served.back.parameters
    return model.join(served.back.parameters, served.rear.parameters)


@dataclass(frozen=True)
class WholeMean:
    """What a round of turns came to. parameters: the mean of the whole models, weighted by examples.

    reports: how many models it holds. loss: mean over the turns, NaN without any. busy_s: each client's
    computing.
    """

    parameters: Vector
    reports: int
    loss: float
    busy_s: dict[int, float]


async def mean_of_turns(
    node: Node, whole: Vector, turns: Sequence[Task[Served | None]], timeout_s: float | None = None
) -> WholeMean:
    """Wait for a round's turns, at most timeout_s seconds, and average what they came to.

    whole: the parameters where no turn ended. A client that was lost is left out with both halves.
    """
    mean, losses, busy_s = WeightedMean(whole.layout), [], {}
    for turn in await finished(node, turns, timeout_s):
        if (served := turn.value) is not None:
            k = served.back.sender
            mean.add(joined(node.model, served), node.fleet.num_examples(k))  # n_k / sum n_k
            losses.append(served.loss)
            busy_s[k] = served.back.busy_s
    return WholeMean(mean.value(otherwise=whole), mean.count, mean_of(losses), busy_s)


def mean_rears(model: Model, whole: Vector, rears: Sequence[tuple[int, Vector, float]]) -> Vector:
    """Average rears of unequal depth, block by block, over those that hold the block.

    whole: what a block keeps that nobody holds. rears: (cut, blocks cut .. L - 1, weight) of each holder.
    """
    last = len(model.blocks)
    blocks = []
    for l in range(last):
        kept = model.cut(whole, l, l + 1)
        mean = WeightedMean(kept.layout)
        for cut, rear, weight in rears:
            if cut <= l:
                mean.add(model.stage(cut, last).cut(rear, l - cut, l - cut + 1), weight)
        blocks.append(mean.value(otherwise=kept))
    return model.join(*blocks)


async def finished(node: Node, tasks: Collection[Task[T]], timeout_s: float | None = None) -> list[Task[T]]:
    """The tasks that ended within the time, in their order; the others are cancelled. None: all will end."""
    end_s = None if timeout_s is None else node.now() + timeout_s
    waiting = list(tasks)
    while waiting:
        left_s = None if end_s is None else end_s - node.now()
        done = await node.first(*waiting, timeout_s=left_s)
        if done is None:
            break
        waiting.remove(done)
    for task in waiting:
        task.cancel()
    return [task for task in tasks if task not in waiting]


def mean_of(values: Sequence[float]) -> float:
    """Their mean; NaN where there are none."""
    return math.fsum(values) / len(values) if values else math.nan
