"""A server's side of split training: rears, one for each client or one for all, and what a round comes to.

Per batch: the server runs its rear on the smashed data, takes the loss and its own step, and returns the
gradient at the cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from edgefl.learning.model import Model
from edgefl.learning.work import StageBackward, StageGradient
from edgefl.nodes import Back, Gone, Node, Task
from edgefl.parameters import Vector, WeightedMean
from edgefl.patterns.cuts import Link, Part, SmashedData, SmashedGradient, mean_of, received_labels
from edgefl.patterns.fronts import Front, FrontBack

T = TypeVar("T")


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
