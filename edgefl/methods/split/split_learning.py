"""Split learning (Gupta and Raskar 2018, https://arxiv.org/abs/1810.06060), label-sharing.

The model is cut after `cut` blocks: the client holds the front, the server the rear. Per batch: the client
runs its front and sends the smashed data and the labels; the server runs its rear, takes the loss and its
own step, and returns the gradient at the cut; the client goes back through its front and takes its step.
Clients take turns; the front's parameters and optimiser state go from one to the next through the server
(choice: the state goes along). One turn is [train]'s local steps or epochs. Labels are sent: the U-shaped
form, in which they stay at home, is another page.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field
from torch import Tensor

from edgefl.errors import ConfigError
from edgefl.learning.work import StageBackward, StageForward, StageGradient
from edgefl.nodes import Gone, Message, Method, MethodConfig, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector


class SplitConfig(MethodConfig):
    """Where the model is cut; batches and rate are [train]'s."""

    cut: int = Field(default=1, ge=1)
    """Blocks at the front, on the client."""


State = tuple[Tensor, ...] | None


@dataclass(frozen=True)
class Turn(Message):
    """The front and its optimiser's state, to or from the client whose turn it is."""

    round: int
    front: Vector
    state: State


@dataclass(frozen=True)
class SmashedData(Message):
    step: int
    values: Tensor
    labels: Tensor


@dataclass(frozen=True)
class SmashedGradient(Message):
    step: int
    values: Tensor
    loss: float


async def server(node: Node) -> Vector:
    model, cut = node.model, node.config.cut
    rear_stage = model.stage(cut, len(model.blocks))
    whole = model.init()
    front, rear = model.cut(whole, 0, cut), model.cut(whole, cut, len(model.blocks))
    front_state: State = node.optimizer.init(front.layout)
    rear_state: State = node.optimizer.init(rear.layout)
    for t in node.rounds():
        for k in node.fleet.ids("client"):
            node.send(k, Turn(t, front, front_state))
            while True:
                m = await node.receive(SmashedData, Turn, Gone, sender=k)
                if not isinstance(m, SmashedData):
                    break
                work = StageBackward(rear_stage, rear, m.values, labels=m.labels)
                g: StageGradient = await node.compute(work)
                rear, rear_state = node.optimizer.step(rear, g.parameters, rear_state, t)
                assert g.input is not None and g.loss is not None
                node.send(k, SmashedGradient(m.step, g.input, g.loss))
                node.record(train_loss=g.loss)
            if isinstance(m, Turn):  # a client that is gone leaves the front of the last whole turn
                front, front_state = m.front, m.state
        node.publish(model.join(front, rear), step=t + 1)
    return model.join(front, rear)


async def client(node: Node) -> None:
    assert node.data is not None
    stage = node.model.stage(0, node.config.cut)
    num_steps = node.workload.num_steps(len(node.data))
    while True:
        m = await node.receive(Turn)
        front, state = m.front, m.state
        for step in range(m.round * num_steps, (m.round + 1) * num_steps):
            batch = node.data.batch(step, node.workload.batch_size)
            smashed: Tensor = await node.compute(StageForward(stage, front, batch.x))
            node.send(m.sender, SmashedData(step, smashed, batch.y))
            back = await node.receive(SmashedGradient, step=step)
            work = StageBackward(stage, front, batch.x, output_gradient=back.values, input_gradient=False)
            g: StageGradient = await node.compute(work)
            front, state = node.optimizer.step(front, g.parameters, state, m.round)
        node.send(m.sender, Turn(m.round, front, state))


def _refuse_impossible(plan: RunPlan) -> None:
    assert plan.learner is not None
    blocks = len(plan.learner.model.blocks)
    if plan.config.cut >= blocks:
        raise ConfigError("method.split-learning.cut", plan.config.cut, f"1 to {blocks - 1} for this model")


METHOD = Method(
    name="split-learning",
    title="Split learning, clients in turn",
    paper="Gupta and Raskar 2018, https://arxiv.org/abs/1810.06060",
    roles={"server": server, "client": client},
    messages=(Turn, SmashedData, SmashedGradient),
    config=SplitConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=_refuse_impossible,
)
