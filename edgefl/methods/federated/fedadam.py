"""FedAdam (Reddi et al. 2021, Algorithm 2, https://arxiv.org/abs/2003.00295).

FedAvg's rounds and clients; the server treats Delta_t = sum_R w_k (y_k - x) as the downhill direction of
Adam: m <- beta1 m + (1 - beta1) Delta, v <- beta2 v + (1 - beta2) Delta^2,
x <- x + eta_g m / (sqrt(v) + tau). Choices, where the paper leaves room: see patterns/server_optimizer.py.
"""

from __future__ import annotations

from typing import Any

from edgefl.methods.federated.fedavg import GlobalModel, LocalModel, Mean, client, serve
from edgefl.nodes import Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import Stop, refuse_void_rounds
from edgefl.patterns.server_optimizer import ServerOptimizerConfig, adaptive_step


class Adam(Mean):
    """A step of Adam along the mean change."""

    def value(self) -> tuple[Vector, Any]:
        return adaptive_step("adam", self.node.config, self.w, self.change(), self.state)


async def server(node: Node) -> Vector:
    return await serve(node, Adam)


METHOD = Method(
    name="fedadam",
    title="Federated averaging with Adam at the server",
    paper="Reddi et al. 2021, https://arxiv.org/abs/2003.00295",
    roles={"server": server, "client": client},
    messages=(GlobalModel, LocalModel, Stop),
    config=ServerOptimizerConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_void_rounds,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, LocalModel)),
    stateless=("client",),
)
