"""Coordinate median (Yin et al. 2018, Algorithm 1, option I, https://arxiv.org/abs/1803.01498).

FedAvg's rounds and clients; each coordinate of the new model is the median of the reports' coordinates, for
an even number of them the mean of the two middle ones. Unweighted: sample counts are claims. It stands any
number of hostile reports below half of them.
"""

from __future__ import annotations

from torch import Tensor

from edgefl.methods.federated.fedavg import GlobalModel, LocalModel, client, serve
from edgefl.nodes import Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.parameters.robust import coordinate_median
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.robust import Rows
from edgefl.patterns.rounds import RoundConfig, Stop, refuse_void_rounds


class Median(Rows):
    """The median of each coordinate."""

    def combine(self, rows: Tensor) -> Tensor:
        return coordinate_median(rows)


async def server(node: Node) -> Vector:
    return await serve(node, Median)


METHOD = Method(
    name="median",
    title="Federated rounds with the coordinate median",
    paper="Yin et al. 2018, https://arxiv.org/abs/1803.01498",
    roles={"server": server, "client": client},
    messages=(GlobalModel, LocalModel, Stop),
    config=RoundConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_void_rounds,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, LocalModel)),
    stateless=("client",),
)
