"""EdgeSplit (Zhang et al. 2024, https://arxiv.org/abs/2403.15815): parallel split learning, a cut per device.

l_n: device n's cut; b_n: its share of the server's link, B bytes per second each way. A round: the server
sends device n its front, layers 1..l_n; for the round's batches all devices train at once, each with a rear
of its own on the server; the fronts come back, and W = sum_n (|D_n| / sum |D|) W_n, layer by layer, W_n the
front of n joined with its rear. Cuts and shares come from the alternating planner (planning.edgesplit), so
that the longest round ends soonest; what is sent is paced at b_n.

Only the paper's abstract could be read. Its own are: a cut per device, shares of the bandwidth, the shortest
training, alternation. Choices: the time model; rears as in SplitFed V1, each on 1/N of the server, so that
they never queue; `allow_local`: a device may take the whole model, and trains alone; a device's own link caps
b_n (`own_link_caps`); fresh optimisers each round, so that no state belongs to moved layers; with
`replan_above`, a round is planned anew where a device's computing took that much more or less than planned;
a device that is gone is left out of the round's average, a slow one is waited for.
`plan` other than "alternating" gives the paper's kinds of baseline.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgefl.nodes import Back, Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.cuts import Link, PlannedCutsConfig, SmashedData, SmashedGradient
from edgefl.patterns.fronts import Front, FrontBack, serve_turns, shared_front
from edgefl.patterns.rears import begin_turn, mean_of_turns
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import somebody_alive
from edgefl.planning.assign import SplitFleet, edgesplit_plan, refuse_unfit
from edgefl.planning.memory import needs_with_planned_cuts


class EdgeSplitConfig(PlannedCutsConfig):
    """How cuts and shares are found; batches, steps and rate are [train]'s."""

    plan: Literal["alternating", "own-cuts", "common", "common-shared", "middle"] = "alternating"
    """alternating: the paper's. own-cuts: best cuts at equal shares. common: the best cut for all, equal
    shares; common-shared: at the best shares. middle: half of the blocks for all, equal shares."""
    allow_local: bool = True
    """Whether a device may train the whole model by itself."""
    own_link_caps: bool = True
    """Whether a device's own link limits its share."""
    replan_above: float | None = Field(default=None, gt=0)
    """Plan anew when a device's computing took this share more or less than planned; not given: never."""


async def server(node: Node) -> Vector:
    config: EdgeSplitConfig = node.config
    fleet = SplitFleet.of(node.fleet, node.learner, node.seed)
    clients = node.fleet.ids("client")
    saved = node.saved or {"w": node.model.init(), "round": 0, "slowdowns": dict.fromkeys(clients, 1.0)}
    w: Vector = saved["w"]
    slowdowns: dict[int, float] = dict(saved["slowdowns"])
    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        node.take(Back)
        plan = edgesplit_plan(fleet, config, tuple(slowdowns[k] for k in clients))
        began_s = node.now()
        turns = []
        for k, cut, b in zip(clients, plan.cuts, plan.rates, strict=True):
            rate, share = config.kept(b, 1 / len(clients))
            link = Link(k, (node.life, t), config.packing, rate)
            turns.append(begin_turn(node, link, cut, w, share=share))
        mean = await mean_of_turns(node, w, turns)
        w = mean.parameters
        slowdowns = fleet.measured(plan.cuts, mean.busy_s, slowdowns, config.replan_above)
        node.record(
            round=t, reports=mean.reports, missing=len(clients) - mean.reports, train_loss=mean.loss,
            round_s=node.now() - began_s, planned_round_s=plan.round_s,
        )  # fmt: skip
        node.publish(w, step=t + 1)
        await node.save(w=w, round=t + 1, slowdowns=slowdowns)
    return w


async def client(node: Node) -> None:
    await serve_turns(node, Front, shared_front)


METHOD = Method(
    name="edgesplit",
    title="Parallel split learning with a cut and a bandwidth share per device",
    paper="Zhang et al. 2024, https://arxiv.org/abs/2403.15815",
    roles={"server": server, "client": client},
    messages=(Front, SmashedData, SmashedGradient, FrontBack),
    config=EdgeSplitConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_unfit,
    memory=needs_with_planned_cuts,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(Front, FrontBack), answers(SmashedData, SmashedGradient)),
)
