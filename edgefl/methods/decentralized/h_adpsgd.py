"""H-ADPSGD (Zhang et al. 2019, A Highly Efficient Distributed Deep Learning System for ASR,
https://arxiv.org/abs/1907.05701): AD-PSGD between sites, all-reduce within.

M sites of G learners each; site m holds one model x_m. Step of a site: each learner's gradient at the common
xhat_m, their mean Gbar_m by ring all-reduce (a barrier inside the site only), and one optimiser step with
Gbar_m on x_m: as one AD-PSGD worker with batch G b. Beside that, x_m, x_p <- (x_m + x_p) / 2 with partner
sites, even sites passive and odd ones active. So this is ad_psgd.py whose gradient oracle is a G-way mean.
Choices: the lowest living learner, the head, exchanges models. After each mean gradient it gives an order:
apply it, or hold it (its exchange is open: nobody changes x; a second gradient waits for the order until it
closes); with the head's x, which all take, where an exchange has ended since the last order. Optimiser states
stay equal, as all apply the same gradients in the same order; so one that depends on x is refused. A lost
learner shrinks its site, which repeats the step; a lost head is followed by the next; lost sites are skipped.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.learning.work import GradientResult
from edgefl.methods.decentralized.ad_psgd import Ask, Reply, average, last_step
from edgefl.nodes import Faults, Gone, Method, MethodConfig, Node, Task
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.patterns.all_reduce import Chunk
from edgefl.patterns.farewell import Finished
from edgefl.patterns.reports import ALL_FINITE, answers
from edgefl.patterns.sites import MESSAGES, Site, heads, site_of


class SitesConfig(MethodConfig):
    """How the fleet is divided; the gradient and the optimiser are [train]'s."""

    learners_per_site: int = Field(default=2, ge=1)
    """G: consecutive nodes of the fleet that take each step together."""


class HADPSGDConfig(SitesConfig):
    """G, and how sites exchange."""

    exchanges_per_step: Literal[0, 1] = 1
    """Exchanges that an active site starts per applied gradient; 0: the next as soon as one closes."""
    partner: Literal["random", "cycle"] = "random"
    """Each exchange's partner: drawn uniformly, or the passive sites in turn."""


async def learner(node: Node) -> Vector:
    G, last = node.config.learners_per_site, last_step(node)
    site = Site(node, G)
    site.regroup()
    if site.leads or not await site.follow(last):
        await lead(node, site)
    if is_active(node, node.id):
        node.send(_learners(node, active=False), Finished())
    return site.x


async def lead(node: Node, site: Site) -> None:
    """The head's loop: AD-PSGD's worker, whose gradients are the site's."""
    config: HADPSGDConfig = node.config
    active, last = is_active(node, node.id), last_step(node)
    asking = set() if active else {j for j in _learners(node, active=True) if node.fleet.alive(j)}
    computing: Task[GradientResult | None] | None = None
    partner: int | None = None
    seen: deque[int] = deque()  # averagings at the start of each gradient that is held
    exchanges, averagings, read_at, told = 0, 0, 0, 0
    may_exchange, owed, lost = config.exchanges_per_step == 0, False, False
    while site.held:  # what an earlier head was holding: its exchange is over
        site.apply_next()
    if site.epoch:
        site.sync()

    while site.step < last or site.held or partner is not None or asking:
        if lost and len(site.held) < 2:
            site.sync()
            lost, owed, told = False, False, averagings
        if computing is None and len(site.held) < 2 and site.step < last:
            computing = node.start(site.mean_gradient(site.x, site.step))
            read_at = averagings
        if active and partner is None and may_exchange and site.step < last:
            partner = _partner(node, exchanges)
            if partner is not None:
                exchanges, may_exchange = exchanges + 1, config.exchanges_per_step == 0
                node.send(partner, Ask(exchanges, site.x))
        m = await node.first(node.receive(Ask, Reply, Finished, Gone), *([computing] if computing else []))
        if m is computing and computing is not None:
            if computing.value is not None:
                site.held.append(computing.value)
                seen.append(read_at)
                site.step, owed = site.step + 1, True
            computing = None
        elif isinstance(m, Ask):
            node.send(m.sender, Reply(m.exchange, site.x))
            site.x, averagings = average(m.parameters, site.x), averagings + 1
            node.publish(site.x, step=site.step - len(site.held))
        elif isinstance(m, Reply) and m.sender == partner and m.exchange == exchanges:
            site.x, averagings, partner = average(site.x, m.parameters), averagings + 1, None
        elif isinstance(m, Gone | Finished):
            asking.discard(m.sender)
            partner = None if m.sender == partner else partner
        if site.regroup():
            lost = True
            if computing is not None:
                computing.cancel()
                computing = None
        while site.held and partner is None:
            G = site.apply_next()
            may_exchange = True
            node.record(train_loss=G.loss, staleness=averagings - seen.popleft())
            node.publish(site.x, step=site.step - len(site.held))
        if owed and not lost and len(site.held) < 2:
            site.order(changed=averagings != told)
            owed, told = False, averagings
    if lost:
        site.sync()
    await site.end(changed=averagings != told)


def is_active(node: Node, j: int) -> bool:
    """Whether node j's site asks: odd sites do, even ones answer."""
    return site_of(j, node.config.learners_per_site) % 2 == 1


def _learners(node: Node, *, active: bool) -> list[int]:
    return [j for j in node.fleet.ids() if is_active(node, j) == active]


def _partner(node: Node, exchange: int) -> int | None:
    """The head of a living passive site, as AD-PSGD chooses it; None where there is none."""
    size = node.config.learners_per_site
    living = heads(node, range(0, len(node.fleet.ids()) // size, 2), size)
    if not living:
        return None
    if node.config.partner == "cycle":
        return living[exchange % len(living)]
    return int(node.rng("partner", exchange).choice(living))


def refuse_impossible(plan: RunPlan) -> None:
    """Refuses a fleet that G does not divide, and an optimiser whose state depends on the model."""
    assert plan.learner is not None
    G, n, train = plan.config.learners_per_site, len(plan.nodes), plan.learner.train
    key = f"method.{plan.method.name}.learners_per_site"
    if n % G:
        raise ConfigError(key, G, f"a divisor of {n}, the number of learners")
    coupled = train.optimizer == "adam" or (train.optimizer == "sgd" and train.momentum)
    if G > 1 and train.weight_decay and coupled:
        accepted = "0 (or optimizer adamw): with it the states of a site's optimisers would part"
        raise ConfigError("train.weight_decay", train.weight_decay, accepted)


METHOD = Method(
    name="h-adpsgd",
    title="AD-PSGD between sites, all-reduce within",
    paper="Zhang et al. 2019, https://arxiv.org/abs/1907.05701",
    roles={"learner": learner},
    messages=(Ask, Reply, Finished, Chunk, *MESSAGES),
    config=HADPSGDConfig,
    ends_with=("learner",),
    needs="complete",
    evaluates="each",
    prepare=refuse_impossible,
    tolerates=Faults(crashes=True, partitions=True),
    invariants=(ALL_FINITE, answers(Ask, Reply)),
)
