"""FedAdagrad (Reddi et al. 2021, Algorithm 2, https://arxiv.org/abs/2003.00295).

FedAvg's rounds and clients; the server treats Delta_t = sum_R w_k (y_k - x) as the downhill direction of
Adagrad: m <- beta1 m + (1 - beta1) Delta, v <- v + Delta^2,
x <- x + eta_g m / (sqrt(v) + tau). Choices, where the paper leaves room: see patterns/server_optimizer.py.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from edgefl.methods.federated.fedavg import GlobalModel, LocalModel, Mean, client, serve
from edgefl.nodes import Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import Stop, refuse_void_rounds
from edgefl.patterns.server_optimizer import ServerOptimizerConfig, adaptive_step


class FedAdagradConfig(ServerOptimizerConfig):
    """As for its siblings, but beta1 = 0, as the paper has it; beta2 is not used."""

    beta1: float = Field(default=0.0, ge=0, lt=1)


class Adagrad(Mean):
    """A step of Adagrad along the mean change."""

    def value(self) -> tuple[Vector, Any]:
        return adaptive_step("adagrad", self.node.config, self.w, self.change(), self.state)


async def server(node: Node) -> Vector:
    return await serve(node, Adagrad)


METHOD = Method(
    name="fedadagrad",
    title="Federated averaging with Adagrad at the server",
    paper="Reddi et al. 2021, https://arxiv.org/abs/2003.00295",
    roles={"server": server, "client": client},
    messages=(GlobalModel, LocalModel, Stop),
    config=FedAdagradConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_void_rounds,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, LocalModel)),
    stateless=("client",),
)
