"""SplitFed V1 (Thapa et al. 2022, SFLV1, https://arxiv.org/abs/2004.12088).

All clients work in parallel, each on its own copy of the front; the main server keeps a rear per client and
steps each with its client's smashed data. At the round's end the fed server averages the fronts and the main
server the rears, by n_k. Here one server is both. With the same steps and weights the result is FedAvg's.

Choices: one server; the optimisers of both sides are fresh in each round, as in our FedAvg; a client that is
gone, or late at `round_deadline_s`, is left out with both of its halves; the labels are sent.
"""

from __future__ import annotations

from pydantic import Field

from edgefl.nodes import Back, Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.cuts import Link, OneCutConfig, SmashedData, SmashedGradient
from edgefl.patterns.fronts import Front, FrontBack, serve_turns, shared_front
from edgefl.patterns.rears import begin_turn, mean_of_turns
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import somebody_alive
from edgefl.planning.memory import needs_with_own_rears
from edgefl.planning.split import refuse_impossible_cut


class SplitFedConfig(OneCutConfig):
    """The cut and the rules of a round; batches, steps and rate are [train]'s."""

    round_deadline_s: float | None = Field(default=None, gt=0)
    """Seconds from the start of a round to its end; None: wait for all that live."""


async def server(node: Node) -> Vector:
    config: SplitFedConfig = node.config
    clients = node.fleet.ids("client")
    saved = node.saved or {"w": node.model.init(), "round": 0}
    w: Vector = saved["w"]
    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        node.take(Back)
        links = [Link(k, (node.life, t), config.packing) for k in clients]
        turns = [begin_turn(node, link, config.cut, w) for link in links]
        mean = await mean_of_turns(node, w, turns, config.round_deadline_s)
        w = mean.parameters
        node.record(
            round=t,
            reports=mean.reports,
            missing=len(clients) - mean.reports,
            train_loss=mean.loss,
        )
        node.publish(w, step=t + 1)
        await node.save(w=w, round=t + 1)
    return w


async def client(node: Node) -> None:
    await serve_turns(node, Front, shared_front)


METHOD = Method(
    name="splitfed-v1",
    title="SplitFed, a rear per client",
    paper="Thapa et al. 2022, https://arxiv.org/abs/2004.12088",
    roles={"server": server, "client": client},
    messages=(Front, SmashedData, SmashedGradient, FrontBack),
    config=SplitFedConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_impossible_cut,
    memory=needs_with_own_rears,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(Front, FrontBack), answers(SmashedData, SmashedGradient)),
)
