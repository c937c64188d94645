"""SplitFed V2 (Thapa et al. 2022, SFLV2, https://arxiv.org/abs/2004.12088).

As V1, but with one rear: the server steps it with the clients' batches one after the other, in random order,
and never averages it. The fronts are averaged at the round's end, by n_k.

Choices: `interleave = "batch"`: for each batch number the clients come in an order of their own, keyed by
round and batch; "client": all batches of one client, then the next, in an order keyed by round (the paper's).
The server keeps to the order and waits for whose turn it is. Fronts have fresh optimisers in each round,
the rear's goes on. The steps that a lost client's batches made in the rear stay; its front is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from edgefl.nodes import Back, Faults, Gone, Method, Node
from edgefl.parameters import Vector, WeightedMean
from edgefl.patterns.cuts import Link, OneCutConfig, Part, SmashedData, SmashedGradient, mean_of
from edgefl.patterns.fronts import Front, FrontBack, serve_turns, shared_front
from edgefl.patterns.rears import RearTurn
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import somebody_alive
from edgefl.planning.memory import needs_with_one_rear
from edgefl.planning.split import refuse_impossible_cut


class SplitFedV2Config(OneCutConfig):
    """The cut and the order of the batches; batches, steps and rate are [train]'s."""

    interleave: Literal["batch", "client"] = "batch"
    """What is in random order: the clients within each batch number, or the clients as a whole."""


async def server(node: Node) -> Vector:
    config: SplitFedV2Config = node.config
    model, cut, last = node.model, config.cut, len(node.model.blocks)
    clients, w = node.fleet.ids("client"), node.model.init()
    saved = node.saved or {"front": model.cut(w, 0, cut), "rear": model.cut(w, cut, last), "round": 0}
    front, rear = saved["front"], Part(saved["rear"], saved.get("rear_state"))
    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        node.take(Back)
        turn = RearTurn(node, Link(-1, (node.life, t), config.packing), cut, rear)
        node.send(clients, Front(turn.link.turn, cut, front))
        mean = await _serve(node, turn, t, WeightedMean(front.layout))
        front, rear = mean.value(otherwise=front), turn.rear or rear
        w = model.join(front, rear.parameters)
        node.record(
            round=t, reports=mean.count, missing=len(clients) - mean.count, train_loss=mean_of(turn.losses)
        )
        node.publish(w, step=t + 1)
        await node.save(front=front, rear=rear.parameters, rear_state=rear.state, round=t + 1)
    return w


async def _serve(node: Node, turn: RearTurn, t: int, mean: WeightedMean) -> WeightedMean:
    """Step the rear with all batches in order; then the mean of the fronts."""
    lost: set[int] = set()
    for k in (*_order(node, t), *node.fleet.ids("client")):
        if k in lost:
            continue
        m = await node.receive(SmashedData, FrontBack, Gone, Back, sender=k, turn=turn.link.turn)
        if isinstance(m, SmashedData):
            turn.link = Link(k, turn.link.turn, turn.link.packing)
            await turn.step(m)
        elif isinstance(m, FrontBack) and m.parameters is not None:
            mean.add(m.parameters, node.fleet.num_examples(k))  # n_k / sum n_k
        else:
            lost.add(k)
    return mean


def _order(node: Node, t: int) -> Iterator[int]:
    """Whose batch comes next, batch by batch, over the whole round."""
    steps = {
        k: node.fleet.workload(k).num_steps(node.fleet.num_examples(k)) for k in node.fleet.ids("client")
    }
    if node.config.interleave == "client":
        for k in node.rng("order", t).permutation(list(steps)):
            yield from [int(k)] * steps[int(k)]
        return
    for s in range(max(steps.values())):
        for k in node.rng("order", t, s).permutation([k for k in steps if s < steps[k]]):
            yield int(k)


async def client(node: Node) -> None:
    await serve_turns(node, Front, shared_front)


METHOD = Method(
    name="splitfed-v2",
    title="SplitFed, one rear for all clients",
    paper="Thapa et al. 2022, https://arxiv.org/abs/2004.12088",
    roles={"server": server, "client": client},
    messages=(Front, SmashedData, SmashedGradient, FrontBack),
    config=SplitFedV2Config,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_impossible_cut,
    memory=needs_with_one_rear,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(Front, FrontBack), answers(SmashedData, SmashedGradient)),
)
