"""FedProx (Li et al. 2020, Algorithm 2, https://arxiv.org/abs/1812.06127).

The server is FedAvg's; a client minimises f_k(y) + (mu/2) ||y - w||^2, w the round's start, so that clients
that do unequal amounts of work (the paper's inexactness gamma_k) drift less. Its step is
y <- y - eta (g_k(y) + mu (y - w)).
Choices: cohorts and weights as in our FedAvg (the paper samples with probability p_k and averages plainly),
so that only mu differs. Partial work: with a budget of steps or seconds a client reports what it has when
the budget is used up, with the number of its steps, instead of being dropped at the deadline; at least one
step is made. Seconds are kept by measuring: another step is made if one as long as the mean so far fits.
A client that is at work when its round closes leaves that, as in our FedAvg.
"""

from __future__ import annotations

from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.learning.work import LocalSGD, Trained
from edgefl.methods.federated.fedavg import FedAvgConfig, GlobalModel, LocalModel, server
from edgefl.nodes import Faults, Method, Node
from edgefl.nodes.plan import RunPlan
from edgefl.patterns.compression import Uplink
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import Stop, refuse_void_rounds, unless_stopped


class FedProxConfig(FedAvgConfig):
    """FedAvg's settings, mu, and the budgets of partial work."""

    proximal_mu: float = Field(default=0.01, ge=0)
    """mu: weight of the proximal term; with eta mu >= 2 its gradient steps diverge and it is refused."""
    budget_steps: int | None = Field(default=None, ge=1)
    """Most local steps of a client in a round."""
    budget_s: float | None = Field(default=None, gt=0)
    """Most seconds of a client's local training in a round."""


async def client(node: Node) -> None:
    assert node.data is not None
    uplink = Uplink(node)
    while True:
        m = await node.receive(GlobalModel)
        uplink.settle(m.counted)
        r = await _trained(node, m)
        if r is not None:
            y_k = uplink.model(r.parameters, m.parameters, tag=m.round)
            await uplink.save()
            node.send(m.sender, LocalModel(m.round, y_k, len(node.data), r.num_steps, r.loss))


async def _trained(node: Node, m: GlobalModel) -> Trained | None:
    """The round's local training as far as the budget goes; None when the server closed the round."""
    assert node.data is not None
    config: FedProxConfig = node.config
    w, mu = m.parameters, config.proximal_mu
    whole = node.workload.num_steps(len(node.data))
    most = min(whole, config.budget_steps or whole)
    if config.budget_s is None:
        part = None if most == whole else range(most)
        return await unless_stopped(  # type: ignore[no-any-return]
            node, LocalSGD(w, node.data, m.round, node.workload, proximal_mu=mu, part=part), m.round
        )
    begun, losses = node.now(), list[float]()
    r: Trained | None = None
    while len(losses) < most:
        k = len(losses)
        if k and (node.now() - begun) * (k + 1) / k > config.budget_s:
            break
        y, state = (w, None) if r is None else (r.parameters, r.state)
        work = LocalSGD(y, node.data, m.round, node.workload, mu, state, anchor=w, part=range(k, k + 1))
        r = await unless_stopped(node, work, m.round)
        if r is None:
            return None
        losses.append(r.loss)
    assert r is not None
    return Trained(r.parameters, sum(losses) / len(losses), len(losses))


def refuse_divergence(plan: RunPlan) -> None:
    """Refuse eta mu >= 2, with which the proximal term's gradient steps diverge."""
    refuse_void_rounds(plan)
    assert plan.learner is not None
    eta, mu = plan.learner.train.learning_rate, plan.config.proximal_mu
    if eta * mu >= 2:
        raise ConfigError(
            f"method.{plan.method.name}.proximal_mu", mu, f"below 2 / learning_rate = {2 / eta:g} is needed"
        )


METHOD = Method(
    name="fedprox",
    title="Federated averaging with a proximal term",
    paper="Li et al. 2020, https://arxiv.org/abs/1812.06127",
    roles={"server": server, "client": client},
    messages=(GlobalModel, LocalModel, Stop),
    config=FedProxConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_divergence,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, LocalModel)),
    stateless=("client",),
)
