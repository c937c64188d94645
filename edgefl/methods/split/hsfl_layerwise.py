"""HSFL, layerwise (Sun et al. 2024, https://arxiv.org/abs/2411.13907): fronts are averaged with the rears.

The planner of `hsfl` gives each client k a cut c_k, a share x_k of the link and a share y_k of the server. A
round: the client gets its front of W, trains its batches with a rear of its own on the server, and returns
the front; every layer of W becomes the mean over all clients, front or rear alike, weighted by n_k.
With one cut for all it is SplitFed V1, and for any cuts the result of a round is FedAvg's.

Choices: as in `hsfl`; the whole model may be the client's (`allow_local`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgefl.methods.split.hsfl import HSFLConfig, shares_of
from edgefl.nodes import Back, Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.cuts import Link, SmashedData, SmashedGradient
from edgefl.patterns.fronts import Front, FrontBack, serve_turns, shared_front
from edgefl.patterns.rears import begin_turn, mean_of_turns
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import somebody_alive
from edgefl.planning.assign import SplitFleet, hsfl_plan, refuse_unfit_hsfl
from edgefl.planning.hsfl import HSFLPlan
from edgefl.planning.memory import needs_with_planned_cuts


class HSFLLayerwiseConfig(HSFLConfig):
    """As HSFL's, but for cut 0: fronts are what is averaged."""

    plan: Literal["genetic", "common", "random", "common-equal", "own-cuts"] = "genetic"
    """genetic: a cut for each. common: the best one for all. random: any. These at the best shares.
    common-equal: the best cut for all, and own-cuts: each one's best, at equal shares."""
    allow_local: bool = Field(default=True)
    """Whether a client may train the whole model by itself."""


async def server(node: Node) -> Vector:
    config: HSFLLayerwiseConfig = node.config
    fleet = SplitFleet.of(node.fleet, node.learner, node.seed)
    clients = node.fleet.ids("client")
    saved = node.saved or {"w": node.model.init(), "round": 0, "slowdowns": dict.fromkeys(clients, 1.0)}
    w: Vector = saved["w"]
    slowdowns: dict[int, float] = dict(saved["slowdowns"])
    plan: HSFLPlan | None = None
    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        node.take(Back)
        if plan is None:
            plan = hsfl_plan(fleet, config, moves_front=True, slowdowns=[slowdowns[k] for k in clients])
        began_s, turns = node.now(), []
        for n, k in enumerate(clients):
            rate, share = shares_of(plan, n, fleet, config)
            link = Link(k, (node.life, t), config.packing, rate)
            turns.append(begin_turn(node, link, plan.cuts[n], w, share=share))
        mean = await mean_of_turns(node, w, turns)
        w = mean.parameters
        node.record(
            round=t, reports=mean.reports, missing=len(clients) - mean.reports, train_loss=mean.loss,
            round_s=node.now() - began_s, planned_round_s=plan.shares.round_s,
        )  # fmt: skip
        if (t + 1) % config.replan_rounds == 0:
            slowdowns, plan = fleet.measured(plan.cuts, mean.busy_s, slowdowns, above=0.0), None
        node.publish(w, step=t + 1)
        await node.save(w=w, round=t + 1, slowdowns=slowdowns)
    return w


async def client(node: Node) -> None:
    await serve_turns(node, Front, shared_front)


METHOD = Method(
    name="hsfl-layerwise",
    title="Heterogeneous split federated learning, every layer averaged over all",
    paper="Sun et al. 2024, https://arxiv.org/abs/2411.13907",
    roles={"server": server, "client": client},
    messages=(Front, SmashedData, SmashedGradient, FrontBack),
    config=HSFLLayerwiseConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_unfit_hsfl,
    memory=needs_with_planned_cuts,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(Front, FrontBack), answers(SmashedData, SmashedGradient)),
)
