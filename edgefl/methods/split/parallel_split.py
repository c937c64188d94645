"""Parallel split learning (Jeon and Kim 2020, https://doi.org/10.1109/ICOIN48656.2020.9016486).

All clients run their fronts on a batch each; the server puts the smashed data of all together and takes one
step of one rear on that union; each client goes back through its front with its rows of the gradient.

Choices, where the paper could not be read: the gradient of client k's rows is scaled by (rows of the union /
rows of k), so that its front takes a step on the mean loss of its own batch; the fronts are averaged at the
round's end, by their examples in the round: with one local step, a round is one step of SGD on the union of
the batches. Fronts have fresh optimisers in each round, the rear's goes on. A client that is gone is left
out of the rest of the round, and of its average.
"""

from __future__ import annotations

import torch

from edgefl.learning.work import StageBackward, StageGradient
from edgefl.nodes import Back, Faults, Gone, Method, Node
from edgefl.parameters import Vector, WeightedMean
from edgefl.patterns.cuts import (
    Link,
    OneCutConfig,
    Part,
    SmashedData,
    SmashedGradient,
    mean_of,
    received_labels,
)
from edgefl.patterns.fronts import Front, FrontBack, serve_turns, shared_front
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import somebody_alive
from edgefl.planning.memory import needs_with_a_union
from edgefl.planning.split import refuse_impossible_cut

Ends = SmashedData | FrontBack | Gone | Back


async def server(node: Node) -> Vector:
    config: OneCutConfig = node.config
    model, cut, last = node.model, config.cut, len(node.model.blocks)
    clients, w = node.fleet.ids("client"), node.model.init()
    saved = node.saved or {"front": model.cut(w, 0, cut), "rear": model.cut(w, cut, last), "round": 0}
    front, rear = saved["front"], Part(saved["rear"], saved.get("rear_state"))
    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        node.take(Back)
        node.send(clients, Front((node.life, t), cut, front))
        mean, losses = WeightedMean(front.layout), []
        open_turns, examples = list(clients), dict.fromkeys(clients, 0)
        while open_turns:
            batches = []
            for k in tuple(open_turns):
                m: Ends = await node.receive(
                    SmashedData, FrontBack, Gone, Back, sender=k, turn=(node.life, t)
                )
                if isinstance(m, SmashedData):
                    batches.append(m)
                    examples[k] += m.shape[0]
                    continue
                open_turns.remove(k)
                if isinstance(m, FrontBack) and m.parameters is not None:
                    mean.add(m.parameters, examples[k])
            if batches:
                rear, loss = await _union_step(node, rear, batches, t)
                losses.append(loss)
        front = mean.value(otherwise=front)
        w = model.join(front, rear.parameters)
        node.record(
            round=t, reports=mean.count, missing=len(clients) - mean.count, train_loss=mean_of(losses)
        )
        node.publish(w, step=t + 1)
        await node.save(front=front, rear=rear.parameters, rear_state=rear.state, round=t + 1)
    return w


async def _union_step(node: Node, rear: Part, batches: list[SmashedData], t: int) -> tuple[Part, float]:
    """One step of the rear on all batches together, and to each client its rows of the gradient."""
    stage = node.model.stage(node.config.cut, len(node.model.blocks))
    labels = torch.cat([received_labels(m.labels) for m in batches if m.labels is not None])
    smashed = torch.cat([m.tensor() for m in batches])
    g: StageGradient = await node.compute(StageBackward(stage, rear.parameters, smashed, labels=labels))
    assert g.input is not None and g.loss is not None
    for m, rows in zip(batches, torch.split(g.input, [m.shape[0] for m in batches]), strict=True):
        link = Link(m.sender, m.turn, node.config.packing)
        link.send(node, SmashedGradient, m.step, rows * (len(smashed) / len(rows)))
    return rear.stepped(node, g.parameters, t), g.loss


async def client(node: Node) -> None:
    await serve_turns(node, Front, shared_front)


METHOD = Method(
    name="parallel-split",
    title="Parallel split learning, one step on the union of all batches",
    paper="Jeon and Kim 2020, https://doi.org/10.1109/ICOIN48656.2020.9016486",
    roles={"server": server, "client": client},
    messages=(Front, SmashedData, SmashedGradient, FrontBack),
    config=OneCutConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_impossible_cut,
    memory=needs_with_a_union,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(Front, FrontBack), answers(SmashedData, SmashedGradient)),
)
