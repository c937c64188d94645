"""A client's side of split training: a front that it trains, turn by turn.

Per batch: the client runs its front and sends the smashed data with the labels; when the gradient at the cut
is there, it goes back through the front and takes its step. The forward pass is kept until then.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from edgefl.data import Batch
from edgefl.learning.work import StageBackward, StageForward, StageGradient, Work
from edgefl.nodes import Message, Node
from edgefl.parameters import Vector
from edgefl.parameters.crossing import Packing
from edgefl.patterns.cuts import Link, Part, SmashedData, SmashedGradient, mean_of, shared_labels

M = TypeVar("M", bound=Message)


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
    tell: Callable[[Node, dict[str, Any], bool], None] | None = None,
) -> None:
    """A client's life: handle each turn, and save what the handling returns; a newer turn ends an older one.

    kind: the message that a turn begins with. handle: given the node, the message and what was saved last;
    it sends the answer itself. tell: for clients with a memory, sends the answer in its place, from what was
    saved, which is on the disk by then; True: once more, as the first may not have left before a crash.
    """
    saved = dict(node.saved or {})
    if tell is not None and saved:
        tell(node, saved, True)
    m = await node.receive(kind)
    while True:
        work = node.start(handle(node, m, saved))
        newer: Any = await node.first(node.receive(kind), work)
        if newer is work:
            saved = work.value
            if tell is None:
                await node.save(**saved)
            else:
                await node.store(**saved)
                tell(node, saved, False)
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
