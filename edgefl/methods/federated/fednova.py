"""FedNova (Wang et al. 2020, equation 6, https://arxiv.org/abs/2007.07481).

Client k makes tau_k local steps; y_k = w - eta sum_j a_kj g_kj, with weights a_k of its gradients that
follow from its optimiser. Normalised direction d_k = (w - y_k) / (eta ||a_k||_1); p_k = n_k / sum n over
those R that reported; w <- w - tau_eff eta sum_R p_k d_k with tau_eff = sum_R p_k ||a_k||_1 (the paper
leaves tau_eff open). So unequal amounts of work do not bias the fixed point, which FedAvg's mean of models
does.
||a||_1 of tau steps: tau for SGD; with momentum rho, (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho);
with a proximal term mu, (1 - (1 - eta mu)^tau) / (eta mu).
Choices: clients report tau_k, of which the server computes ||a_k||_1; eta cancels and is not needed.
Budgets of work are FedProx's: a slow client makes fewer steps. Rounds, deadline and weights as in our
FedAvg.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.methods.federated.fedavg import GlobalModel, LocalModel, serve
from edgefl.methods.federated.fedprox import FedProxConfig, client, refuse_divergence
from edgefl.nodes import Faults, Method, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector, WeightedMean
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import Stop


class FedNovaConfig(FedProxConfig):
    """FedAvg's settings; mu and the budgets of partial work as in FedProx."""

    proximal_mu: float = Field(default=0.0, ge=0)
    """mu."""
    weighting: Literal["samples", "uniform"] = "samples"
    """p_k, up to their sum: n_k, or 1."""


def norm_of_weights(tau: int, rho: float, eta_mu: float) -> float:
    """||a||_1 of tau steps with momentum rho, or with a proximal term of eta mu.

    >>> round(norm_of_weights(7, 0.9, 0.0), 4), norm_of_weights(7, 0.0, 0.0)
    (23.0467, 7.0)
    """
    if eta_mu:
        return (1 - (1 - eta_mu) ** tau) / eta_mu
    return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)


class Normalised:
    """w + tau_eff sum_R p_k (y_k - w) / ||a_k||_1."""

    def __init__(self, node: Node, w: Vector, state: Any) -> None:
        self._node, self._w = node, w
        self._directions = WeightedMean(w.layout)
        self._effective = 0.0

    def add(self, r: LocalModel, y: Vector) -> None:
        config, optimizer = self._node.config, self._node.optimizer
        factor = self._node.fleet.workload(r.sender).rate_factor
        eta_mu = optimizer.rate(r.round) * factor * config.proximal_mu
        a = norm_of_weights(r.num_steps, optimizer.train.momentum, eta_mu)
        n_k = 1 if config.weighting == "uniform" else r.num_examples
        self._directions.add((y - self._w) / a, n_k)
        self._effective += n_k * a

    def value(self) -> tuple[Vector, None]:
        tau_eff = self._effective / self._directions.weight
        change = self._directions.value(otherwise=self._w)
        return self._w + change * (tau_eff * self._node.config.server_rate), None


async def server(node: Node) -> Vector:
    return await serve(node, Normalised)


def _refuse_unknown_weights(plan: RunPlan) -> None:
    """||a||_1 is known for SGD with momentum or with a proximal term, not for both, nor for Adam."""
    assert plan.learner is not None
    train, mu = plan.learner.train, plan.config.proximal_mu
    if train.optimizer != "sgd" or train.nesterov:
        found = "nesterov" if train.nesterov else train.optimizer
        raise ConfigError("train.optimizer", found, "fednova knows the weights of sgd's gradients only")
    if mu and train.momentum:
        raise ConfigError("method.fednova.proximal_mu", mu, "0 with train.momentum above 0, in fednova")
    refuse_divergence(plan)


METHOD = Method(
    name="fednova",
    title="Federated averaging with normalised directions",
    paper="Wang et al. 2020, https://arxiv.org/abs/2007.07481",
    roles={"server": server, "client": client},
    messages=(GlobalModel, LocalModel, Stop),
    config=FedNovaConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=_refuse_unknown_weights,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, LocalModel)),
    stateless=("client",),
)
