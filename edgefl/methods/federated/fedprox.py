"""FedProx (Li et al. 2020, Algorithm 2, https://arxiv.org/abs/1812.06127).

The server is FedAvg's; a client minimises f_k(y) + (mu/2) ||y - w||^2, w the round's start, so that clients
that do unequal amounts of work drift less. Its step is y <- y - eta (g_k(y) + mu (y - w)).
Choice: cohorts and weights as in our FedAvg (the paper samples with probability p_k and averages plainly),
so that only mu differs. A slow client's smaller amount of work is its Workload (planning), not a deadline.
"""

from __future__ import annotations

from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.learning.work import LocalSGD, Trained
from edgefl.methods.federated.fedavg import FedAvgConfig, GlobalModel, LocalModel, server
from edgefl.nodes import Faults, Method, Node
from edgefl.nodes.plan import RunPlan


class FedProxConfig(FedAvgConfig):
    """FedAvg's settings and mu."""

    proximal_mu: float = Field(default=0.01, ge=0)
    """mu: weight of the proximal term; with eta mu >= 2 its gradient steps diverge and it is refused."""


async def client(node: Node) -> None:
    assert node.data is not None
    mu = node.config.proximal_mu
    while True:
        m = await node.receive(GlobalModel)
        work = LocalSGD(m.parameters, node.data, m.round, node.workload, proximal_mu=mu)
        r: Trained = await node.compute(work)
        node.send(m.sender, LocalModel(m.round, r.parameters, len(node.data), r.loss))


def _refuse_divergence(plan: RunPlan) -> None:
    assert plan.learner is not None
    eta, mu = plan.learner.train.learning_rate, plan.config.proximal_mu
    if eta * mu >= 2:
        raise ConfigError(
            "method.fedprox.proximal_mu", mu, f"below 2 / learning_rate = {2 / eta:g} is needed"
        )


METHOD = Method(
    name="fedprox",
    title="Federated averaging with a proximal term",
    paper="Li et al. 2020, https://arxiv.org/abs/1812.06127",
    roles={"server": server, "client": client},
    messages=(GlobalModel, LocalModel),
    config=FedProxConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=_refuse_divergence,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    stateless=("client",),
)
