"""Multi-Krum (Blanchard et al. 2017, https://papers.nips.cc/paper/6617).

As Krum, but the new model is the mean of the m reports with the least scores, scored once. Choice: m is
n - f, all that can be honest (the paper's theory wants m <= n - f - 2), or num_best where given.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from edgefl.methods.federated.fedavg import GlobalModel, LocalModel, client, serve
from edgefl.methods.federated.krum import Krum
from edgefl.nodes import Faults, Method, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.parameters.robust import best_by_krum
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.robust import HostileConfig, refuse_small_cohorts
from edgefl.patterns.rounds import Stop


class MultiKrumConfig(HostileConfig):
    """Krum's settings and m."""

    num_best: int | None = Field(default=None, ge=1)
    """m: reports that are averaged; all that came but num_hostile where not given."""


class MultiKrum(Krum):
    """The mean of the reports in the densest places."""

    @staticmethod
    def least(config: Any) -> int:
        return max(Krum.least(config), config.num_best or 1)

    def combine(self, rows: Tensor) -> Tensor:
        num_best = self.config.num_best or len(rows) - self.config.num_hostile
        best = sorted(best_by_krum(rows, self.config.num_hostile, num_best))
        return rows[best].double().mean(0).to(rows.dtype)


async def server(node: Node) -> Vector:
    return await serve(node, MultiKrum)


def _refuse_impossible(plan: RunPlan) -> None:
    refuse_small_cohorts(plan, MultiKrum.least(plan.config), "num_hostile")


METHOD = Method(
    name="multi-krum",
    title="Federated rounds with Multi-Krum",
    paper="Blanchard et al. 2017, https://papers.nips.cc/paper/6617",
    roles={"server": server, "client": client},
    messages=(GlobalModel, LocalModel, Stop),
    config=MultiKrumConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=_refuse_impossible,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, LocalModel)),
    stateless=("client",),
)
