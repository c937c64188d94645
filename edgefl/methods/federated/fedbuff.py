"""FedBuff (Nguyen et al. 2022, Algorithm 1, https://arxiv.org/abs/2106.06639).

x: parameters; t: server version; clients work as in FedAsync but send delta_k = y_k - x_tau, from the model
that they started from. The server sums s(u_j) delta_j, s(u) = 1 / sqrt(1 + u) unless the staleness keys say
else, in a buffer; at K updates x <- x + eta_g (1/K) sum_j s(u_j) delta_j, t <- t + 1, and it is empty.
Choices: division by K, not by the sum of s; uniform weights; server momentum v <- beta v + mean,
x <- x + eta_g v, off by default. The direction is the paper's (y minus the model that the client started
from), not that of implementations that take y minus the current model, which is buffered FedAsync. A round
of [stop] is as many updates as there are clients, as in our FedAsync; the same client may be in a buffer
twice; updates in the buffer at the end are dropped and counted (`pending`).
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from edgefl.learning.work import LocalSGD, Trained
from edgefl.methods.federated.fedasync import GlobalModel, Update, serve
from edgefl.nodes import Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.asynchronous import StalenessConfig, discount
from edgefl.patterns.compression import Uplink
from edgefl.patterns.reports import FINITE, Intake, answers


class FedBuffConfig(StalenessConfig):
    """K, eta_g and the momentum; s as in FedAsync."""

    buffer_size: int = Field(default=10, ge=1)
    """K: updates in one step of the server."""
    server_rate: float = Field(default=1.0, gt=0)
    """eta_g."""
    server_momentum: float = Field(default=0.0, ge=0, lt=1)
    """beta."""


class Buffer:
    """The sum of discounted changes, their number, and the momentum."""

    def __init__(self, config: FedBuffConfig, saved: Any) -> None:
        self._config = config
        self.count: int
        self._sum: Vector | None
        self._velocity: Vector | None
        self._sum, self.count, self._velocity = saved or (None, 0, None)

    def opened(self, intake: Intake, m: Update, x: Vector, start: Vector | None) -> Vector | None:
        return intake.change(m.sender, m.parameters, x.layout)

    def take(self, x: Vector, update: Vector, u: int) -> Vector | None:
        K, beta = self._config.buffer_size, self._config.server_momentum
        change = update * discount(self._config, u)
        self._sum = change if self._sum is None else self._sum + change
        self.count += 1
        if self.count < K:
            return None
        step, self._sum, self.count = self._sum, None, 0
        if beta:
            step = step if self._velocity is None else self._velocity * beta + step
            self._velocity = step
        return x.moved(step, self._config.server_rate / K)

    def state(self) -> Any:
        return (self._sum, self.count, self._velocity)


async def server(node: Node) -> Vector:
    buffer = Buffer(node.config, (node.saved or {}).get("merge"))
    x = await serve(node, buffer, keep_starts=False)
    node.record(pending=buffer.count)
    return x


async def client(node: Node) -> None:
    assert node.data is not None
    uplink = Uplink(node)
    while True:
        m = await node.receive(GlobalModel)
        uplink.settle(m.counted)
        r: Trained = await node.compute(LocalSGD(m.parameters, node.data, m.turn, node.workload))
        delta = uplink.change(r.parameters - m.parameters, tag=m.turn)
        await uplink.save()
        node.send(m.sender, Update(m.life, m.version, m.turn, delta, r.loss))


METHOD = Method(
    name="fedbuff",
    title="Buffered asynchronous aggregation",
    paper="Nguyen et al. 2022, https://arxiv.org/abs/2106.06639",
    roles={"server": server, "client": client},
    messages=(GlobalModel, Update),
    config=FedBuffConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, Update)),
    stateless=("client",),
)
