"""Split learning (Gupta and Raskar 2018, https://arxiv.org/abs/1810.06060), label-sharing.

The model is cut after `cut` blocks: the client holds the front, the server the rear. Per batch: the client
runs its front and sends the smashed data and the labels; the server runs its rear, takes the loss and its
own step, and returns the gradient at the cut; the client goes back through its front and takes its step.
Clients take turns; the front goes from one to the next through the server. One turn is [train]'s local
steps or epochs, at the same rate on both sides.

Choices: the optimiser's state of the front goes along (`handover_optimizer`), or is fresh in each turn.
Of a client that is gone in its turn the open batch is dropped, and the front of the last whole turn goes
to the next; the rear keeps the steps that it has made. Labels are sent: the U-shaped form, in which they
stay at home, is another page.
"""

from __future__ import annotations

from edgefl.nodes import Back, Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.cuts import Link, OneCutConfig, Part, SmashedData, SmashedGradient, mean_of
from edgefl.patterns.fronts import Front, FrontBack, serve_turns, shared_front
from edgefl.patterns.rears import RearTurn
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import somebody_alive
from edgefl.planning.memory import needs_with_one_rear
from edgefl.planning.split import refuse_impossible_cut


class SplitLearningConfig(OneCutConfig):
    """Where the model is cut and what is handed over; batches, steps and rate are [train]'s."""

    handover_optimizer: bool = True
    """Whether the state of the front's optimiser goes from client to client."""


async def server(node: Node) -> Vector:
    return await take_turns(node, RearTurn)


async def take_turns(node: Node, kind: type[RearTurn]) -> Vector:
    """The server of split learning, for one kind of turn."""
    config: SplitLearningConfig = node.config
    model, cut, last = node.model, config.cut, len(node.model.blocks)
    clients, w = node.fleet.ids("client"), model.init()
    saved = node.saved or {"front": model.cut(w, 0, cut), "rear": model.cut(w, cut, last), "round": 0}
    front = Part(saved["front"], saved.get("front_state"))
    rear = Part(saved["rear"], saved.get("rear_state"))
    returns = "parameters and state" if config.handover_optimizer else "parameters"
    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        node.take(Back)
        losses = []
        for k in clients:
            link = Link(k, (node.life, t), config.packing)
            node.send(k, Front(link.turn, cut, front.parameters, front.state, returns))
            turn = kind(node, link, cut, rear)
            served = await turn.run()
            assert turn.rear is not None
            rear = turn.rear
            if served is not None and served.back.parameters is not None:
                front = Part(served.back.parameters, served.back.state)
                losses.append(served.loss)
        w = model.join(front.parameters, rear.parameters)
        node.record(
            round=t, turns=len(losses), missing=len(clients) - len(losses), train_loss=mean_of(losses)
        )
        node.publish(w, step=t + 1)
        await node.save(
            front=front.parameters, front_state=front.state, rear=rear.parameters, rear_state=rear.state,
            round=t + 1,
        )  # fmt: skip
    return w


async def client(node: Node) -> None:
    await serve_turns(node, Front, shared_front)


METHOD = Method(
    name="split-learning",
    title="Split learning, clients in turn",
    paper="Gupta and Raskar 2018, https://arxiv.org/abs/1810.06060",
    roles={"server": server, "client": client},
    messages=(Front, SmashedData, SmashedGradient, FrontBack),
    config=SplitLearningConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_impossible_cut,
    memory=needs_with_one_rear,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(Front, FrontBack), answers(SmashedData, SmashedGradient)),
)
