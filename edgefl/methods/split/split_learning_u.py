"""U-shaped split learning (Gupta and Raskar 2018, https://arxiv.org/abs/1810.06060): labels stay at home.

The client holds the front (`cut` blocks) and the head (the last `head_blocks`), the server the middle. Per
batch: client -> smashed data a -> server -> features b -> client: loss and the head's way back -> gradient
at b -> server: the middle's way back -> gradient at a -> client: the front's way back. Each part takes its
own step, at the same rate. Clients take turns; both of their parts go from one to the next through the
server.

Choices as in split learning: `handover_optimizer`; of a client that is gone in its turn the open batch is
dropped, its parts of the last whole turn go to the next, and the middle keeps the steps that it has made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field
from torch import Tensor

from edgefl.data import Batch
from edgefl.errors import ConfigError
from edgefl.learning.work import StageBackward, StageForward, StageGradient
from edgefl.methods.split.split_learning import SplitLearningConfig
from edgefl.nodes import Back, Faults, Gone, Message, Method, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.patterns.cuts import Across, Link, Part, mean_of
from edgefl.patterns.fronts import serve_turns, steps_of
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import somebody_alive
from edgefl.planning.memory import needs_with_one_rear
from edgefl.planning.split import refuse_clipping, refuse_too_large


class SplitLearningUConfig(SplitLearningConfig):
    """Where the model is cut; the middle takes what is left, at least one block."""

    head_blocks: int = Field(default=1, ge=1)
    """Blocks at the end, on the client: they see the labels."""


@dataclass(frozen=True)
class Ends(Message):
    """The client's parts and their optimisers' states, to or from the client whose turn it is."""

    stale_by = "turn"
    once_by = ("sender", "turn")
    turn: tuple[int, int]
    front: Vector
    head: Vector
    front_state: tuple[Tensor, ...] | None
    head_state: tuple[Tensor, ...] | None
    loss: float | None = None


@dataclass(frozen=True)
class SmashedData(Across):
    """a: the front's output."""

    noisy = True


@dataclass(frozen=True)
class Features(Across):
    """b: the middle's output."""


@dataclass(frozen=True)
class FeatureGradient(Across):
    """The gradient of the loss at b."""


@dataclass(frozen=True)
class SmashedGradient(Across):
    """The gradient of the loss at a."""


async def server(node: Node) -> Vector:
    config: SplitLearningUConfig = node.config
    model, cut, last = node.model, config.cut, len(node.model.blocks)
    neck = last - config.head_blocks
    clients, w = node.fleet.ids("client"), model.init()
    saved = node.saved or {"front": model.cut(w, 0, cut), "middle": model.cut(w, cut, neck)}
    front, middle = (Part(saved[name], saved.get(f"{name}_state")) for name in ("front", "middle"))
    head = Part(saved.get("head", model.cut(w, neck, last)), saved.get("head_state"))
    for t in node.rounds(saved.get("round", 0)):
        await somebody_alive(node, clients)
        node.take(Back)
        losses = []
        for k in clients:
            link = Link(k, (node.life, t), config.packing)
            node.send(k, Ends(link.turn, front.parameters, head.parameters, front.state, head.state))
            middle, m = await _serve(node, link, middle)
            if m is not None:
                front, head = Part(m.front, m.front_state), Part(m.head, m.head_state)
                losses.append(m.loss or 0.0)
        w = model.join(front.parameters, middle.parameters, head.parameters)
        node.record(
            round=t, turns=len(losses), missing=len(clients) - len(losses), train_loss=mean_of(losses)
        )
        node.publish(w, step=t + 1)
        parts = {"front": front, "middle": middle, "head": head}
        states = {f"{name}_state": part.state for name, part in parts.items()}
        await node.save(round=t + 1, **{name: part.parameters for name, part in parts.items()}, **states)
    return w


async def _serve(node: Node, link: Link, middle: Part) -> tuple[Part, Ends | None]:
    """One client's turn: the middle after it, and the client's parts; None when it is gone."""
    config: SplitLearningUConfig = node.config
    stage = node.model.stage(config.cut, len(node.model.blocks) - config.head_blocks)
    k, turn = link.to, link.turn
    while True:
        m = await node.receive(SmashedData, Ends, Gone, Back, sender=k, turn=turn)
        if not isinstance(m, SmashedData):
            return middle, m if isinstance(m, Ends) else None
        a = m.tensor()
        b: Tensor = await node.compute(StageForward(stage, middle.parameters, a, keep=True))
        link.send(node, Features, m.step, b)
        back = await node.receive(FeatureGradient, Gone, Back, sender=k, turn=turn)
        if not isinstance(back, FeatureGradient):
            return middle, None
        work = StageBackward(stage, middle.parameters, a, output_gradient=back.tensor(), kept=True)
        g: StageGradient = await node.compute(work)
        assert g.input is not None
        middle = middle.stepped(node, g.parameters, link.round)
        link.send(node, SmashedGradient, m.step, g.input)


async def client(node: Node) -> None:
    await serve_turns(node, Ends, _turn)


async def _turn(node: Node, m: Ends, saved: dict[str, Any]) -> dict[str, Any]:
    assert node.data is not None
    link = Link(m.sender, m.turn, node.config.packing)
    front, head = Part(m.front, m.front_state), Part(m.head, m.head_state)
    losses = []
    for step in steps_of(node, link.round):
        batch = node.data.batch(step, node.workload.batch_size)
        front, head, loss = await _step(node, link, front, head, batch, step)
        losses.append(loss)
    keeps = node.config.handover_optimizer
    states = (front.state, head.state) if keeps else (None, None)
    node.send(m.sender, Ends(m.turn, front.parameters, head.parameters, *states, mean_of(losses)))
    return {}


async def _step(
    node: Node, link: Link, front: Part, head: Part, batch: Batch, step: int
) -> tuple[Part, Part, float]:
    """One batch: the front and the head after it, and the loss."""
    config, model, x = node.config, node.model, batch.x
    first, last = model.stage(0, config.cut), len(model.blocks)
    final = model.stage(last - config.head_blocks, last)
    link.send(
        node, SmashedData, step, await node.compute(StageForward(first, front.parameters, x, keep=True))
    )
    features = await node.receive(Features, sender=link.to, turn=link.turn, step=step)
    work = StageBackward(final, head.parameters, features.tensor(), labels=batch.y)
    g: StageGradient = await node.compute(work)
    assert g.input is not None and g.loss is not None
    head = head.stepped(node, g.parameters, link.round)
    link.send(node, FeatureGradient, step, g.input)
    back = await node.receive(SmashedGradient, sender=link.to, turn=link.turn, step=step)
    work = StageBackward(
        first, front.parameters, x, output_gradient=back.tensor(), input_gradient=False, kept=True
    )
    f: StageGradient = await node.compute(work)
    return front.stepped(node, f.parameters, link.round), head, g.loss


def _refuse_impossible(plan: RunPlan) -> None:
    assert plan.learner is not None
    config, blocks = plan.config, len(plan.learner.model.blocks)
    if config.cut + config.head_blocks >= blocks:
        accepted = f"cut + head_blocks below {blocks}, the number of {plan.learner.model.name}'s blocks"
        raise ConfigError("method.split-learning-u.cut", config.cut, accepted)
    refuse_clipping(plan)
    for k in plan.ids("client"):
        refuse_too_large(plan, k, config.cut, key="cut", head_blocks=config.head_blocks)


METHOD = Method(
    name="split-learning-u",
    title="U-shaped split learning, labels stay at home",
    paper="Gupta and Raskar 2018, https://arxiv.org/abs/1810.06060",
    roles={"server": server, "client": client},
    messages=(Ends, SmashedData, Features, FeatureGradient, SmashedGradient),
    config=SplitLearningUConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=_refuse_impossible,
    memory=needs_with_one_rear,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(
        FINITE,
        answers(SmashedData, Features),
        answers(FeatureGradient, SmashedGradient),
        answers(Features, FeatureGradient),
    ),
)
