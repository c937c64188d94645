"""Trimmed mean (Yin et al. 2018, Algorithm 1, option II, https://arxiv.org/abs/1803.01498).

FedAvg's rounds and clients; each coordinate of the new model is the mean of the reports' coordinates without
the b largest and the b smallest; n > 2 b reports are needed. Choice: b is num_hostile, the number of
hostile reports that it must stand (the paper's beta n). Unweighted: sample counts are claims.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from edgefl.methods.federated.fedavg import GlobalModel, LocalModel, client, serve
from edgefl.nodes import Faults, Method, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.parameters.robust import trimmed_mean
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.robust import HostileConfig, Rows, refuse_small_cohorts
from edgefl.patterns.rounds import Stop


class TrimmedMean(Rows):
    """Each coordinate's mean without its b largest and smallest values."""

    @staticmethod
    def least(config: Any) -> int:
        return 2 * int(config.num_hostile) + 1

    def combine(self, rows: Tensor) -> Tensor:
        return trimmed_mean(rows, self.config.num_hostile)


async def server(node: Node) -> Vector:
    return await serve(node, TrimmedMean)


def _refuse_impossible(plan: RunPlan) -> None:
    refuse_small_cohorts(plan, TrimmedMean.least(plan.config), "num_hostile")


METHOD = Method(
    name="trimmed-mean",
    title="Federated rounds with the trimmed mean",
    paper="Yin et al. 2018, https://arxiv.org/abs/1803.01498",
    roles={"server": server, "client": client},
    messages=(GlobalModel, LocalModel, Stop),
    config=HostileConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=_refuse_impossible,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, LocalModel)),
    stateless=("client",),
)
