"""Krum (Blanchard et al. 2017, https://papers.nips.cc/paper/6617).

FedAvg's rounds and clients; the new model is the report with the least score, the sum of its squared
distances to its n - f - 2 nearest others, f hostile ones among n >= 2 f + 3. Choices: ties go to the lowest
id; fewer reports make a void round. Unweighted: sample counts are claims.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from edgefl.methods.federated.fedavg import GlobalModel, LocalModel, client, serve
from edgefl.nodes import Faults, Method, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.parameters.robust import best_by_krum
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.robust import HostileConfig, Rows, refuse_small_cohorts
from edgefl.patterns.rounds import Stop


class Krum(Rows):
    """The report in the densest place."""

    @staticmethod
    def least(config: Any) -> int:
        return 2 * int(config.num_hostile) + 3

    def combine(self, rows: Tensor) -> Tensor:
        (best,) = best_by_krum(rows, self.config.num_hostile, 1)
        return rows[best]


async def server(node: Node) -> Vector:
    return await serve(node, Krum)


def _refuse_impossible(plan: RunPlan) -> None:
    refuse_small_cohorts(plan, Krum.least(plan.config), "num_hostile")


METHOD = Method(
    name="krum",
    title="Federated rounds with Krum",
    paper="Blanchard et al. 2017, https://papers.nips.cc/paper/6617",
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
