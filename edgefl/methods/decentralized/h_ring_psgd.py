"""Decentralized SGD on a ring of sites (Cui et al. 2021, https://arxiv.org/abs/2110.11199): a mixing of the
H-ADPSGD group, all-reduce within sites.

X^{k+1} = X^k T_k - g grad(Phi_k): site m's head sends x_m^k to both neighbors on the ring, its learners take
the mean gradient at x_m^k beside that; x_m^{k+1} = (x_{m-1} + x_m + x_{m+1}) / 3 - g grad (two sites: / 2).
`ring`: "fixed" (ascending sites) or "random" (a new permutation of the sites every step k, the same for all).
Choices (the paper's abstract names the variants, not their forms): weights 1/3; `wait` "lockstep" waits
for the neighbors' models of the same k, so that T_k is doubly stochastic and, in the long run, all go at the
slowest site's pace; "newest" takes the newest that came, never waits, and keeps rows that sum to 1 but not
the sum of models. The optimiser's step is taken at the mixed model. A learner that is lost stops the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from edgefl.errors import ConfigError, PeerGone
from edgefl.learning.work import GradientResult
from edgefl.methods.decentralized.h_adpsgd import SitesConfig, refuse_impossible
from edgefl.nodes import Faults, Gone, Message, Method, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector, mix
from edgefl.patterns.all_reduce import Chunk
from edgefl.patterns.gather import gather
from edgefl.patterns.reports import ALL_FINITE
from edgefl.patterns.sites import MESSAGES, Site, site_of


class HRingConfig(SitesConfig):
    """G, the ring and its waiting rule."""

    ring: Literal["fixed", "random"] = "fixed"
    """Whether the sites' order on the ring changes every step."""
    wait: Literal["lockstep", "newest"] = "lockstep"
    """Whether a site waits for its neighbors' models of the same step."""


@dataclass(frozen=True)
class SiteModel(Message):
    """x_m^k of the sender's site."""

    step: int
    parameters: Vector


async def learner(node: Node) -> Vector:
    site = Site(node, node.config.learners_per_site)
    newest: dict[int, Vector] = {}
    for k in node.rounds():
        computing = node.start(site.mean_gradient(site.x, k))
        if site.leads:
            mixed = await _mixed(node, site.x, k, newest)
        G: GradientResult | None = await computing
        if G is None:
            raise PeerGone(site.members.lost)
        if site.leads:
            site.x, site.state = node.optimizer.step(mixed, G.gradient, site.state, k)
            site.step = k + 1
            site.order(changed=True)
        else:
            site.x = await site.model_of_step(k)
        node.record(train_loss=G.loss)
        node.publish(site.x, step=k + 1)
    return site.x


async def _mixed(node: Node, x: Vector, k: int, newest: dict[int, Vector]) -> Vector:
    """The mean of the site's model and its neighbors' on the ring of step k."""
    beside = ring_neighbors(node, k)
    node.send(beside, SiteModel(k, x))
    if node.config.wait == "lockstep":
        models = {m.sender: m.parameters async for m in gather(node, SiteModel, beside, step=k)}
        if len(models) < len(beside):
            raise PeerGone(min(set(beside) - models.keys()))
    else:
        for gone in node.take(Gone):  # nobody waits for it, but a model that stays would anchor its neighbors
            raise PeerGone(gone.sender)
        newest.update({m.sender: m.parameters for m in node.take(SiteModel)})
        models = dict(newest)
    return equal_mean({node.id: x, **models})


def equal_mean(models: Mapping[int, Vector]) -> Vector:
    """The plain mean, in ascending id; a single model bit for bit."""
    if len(models) == 1:
        return next(iter(models.values()))
    return mix(models, dict.fromkeys(models, 1 / len(models)))


def ring_neighbors(node: Node, k: int) -> list[int]:
    """The heads of the sites before and after this one on the ring of step k, each once."""
    size = node.config.learners_per_site
    M = len(node.fleet.ids()) // size
    order = list(range(M))
    if node.config.ring == "random":
        order = [int(s) for s in node.shared_rng("ring", k).permutation(M)]
    at = order.index(site_of(node.id, size))
    beside = {order[at - 1], order[(at + 1) % M]} - {order[at]}
    return [s * size for s in sorted(beside)]


def _refuse(plan: RunPlan) -> None:
    refuse_impossible(plan)
    if plan.config.ring == "random" and plan.config.wait == "newest":
        raise ConfigError("method.h-ring-psgd.wait", "newest", "lockstep, where the ring is random")


METHOD = Method(
    name="h-ring-psgd",
    title="SGD on a ring of sites, all-reduce within",
    paper="Cui et al. 2021, https://arxiv.org/abs/2110.11199",
    roles={"learner": learner},
    messages=(SiteModel, Chunk, *MESSAGES),
    config=HRingConfig,
    ends_with=("learner",),
    needs="complete",
    evaluates="each",
    prepare=_refuse,
    tolerates=Faults(partitions=True),
    invariants=(ALL_FINITE,),
)
