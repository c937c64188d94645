"""H-ADPSGD (Zhang et al. 2019, A Highly Efficient Distributed Deep Learning System for ASR,
https://arxiv.org/abs/1907.05701): AD-PSGD between sites, all-reduce within.

M sites of G learners each; site m holds one model x_m. Step of a site: each learner's gradient at the common
xhat_m, their mean Gbar_m by ring all-reduce (a barrier inside the site only), and one optimiser step with
Gbar_m on x_m: as one AD-PSGD worker with batch G b. Beside that, x_m, x_p <- (x_m + x_p) / 2 with partner
sites, even sites passive and odd ones active. So this is ad_psgd.py whose gradient oracle is a G-way mean.
Choices: the lowest learner, the head, exchanges models. After each mean gradient it gives an order: apply it,
or hold it (its exchange is open: nobody changes x; a second gradient waits for the order until it closes);
with the head's x, which all take, where an exchange has ended since the last order. Optimiser states stay
equal, as all apply the same gradients in the same order; so one that depends on x is refused. A lost
learner shrinks its site, which repeats the step; a lost head is followed by the next; lost sites are
skipped. One that returns is taken in by its head, behind all others (patterns/site_members.py); as in AD-PSGD
it gives up who says nothing for long, since it may have missed who finished.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.learning.work import GradientResult
from edgefl.methods.decentralized.ad_psgd import Ask, Reply, average, last_step
from edgefl.nodes import Back, Faults, Gone, Message, Method, MethodConfig, Node, Task
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.patterns.all_reduce import Chunk
from edgefl.patterns.farewell import Finished, Leaving, patience_s
from edgefl.patterns.reports import ALL_FINITE, answers
from edgefl.patterns.site_members import NEWS
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


@dataclass(frozen=True)
class Elsewhere(Message):
    """To an Ask: its sender is no head; `head` is, as far as it knows."""

    exchange: int
    head: int


async def learner(node: Node) -> Vector:
    last, active = last_step(node), is_active(node, node.id)
    site = Site(node, node.config.learners_per_site)
    if node.saved is None:
        site.members.hear(None)  # some may have gone before the run began
    ended = node.life > 0 and await site.come_back()
    if not ended and not site.leads:
        # Who never left is asked only as the head that it is, or will be.
        deflecting = node.start(_deflect(node, site)) if node.life and not active else None
        ended = await site.follow(last)
        if deflecting is not None:
            deflecting.cancel()
    if not ended:
        await lead(node, site)
    node.send(_learners(node, active=not active), Finished() if active else Leaving())
    return site.x


async def _deflect(node: Node, site: Site) -> None:
    """Send on who takes this learner for the head."""
    while True:
        m = await node.receive(Ask)
        node.send(m.sender, Elsewhere(m.exchange, site.members.ids[0]))


async def lead(node: Node, site: Site) -> None:
    """The head's loop: AD-PSGD's worker, whose gradients are the site's."""
    config: HADPSGDConfig = node.config
    active, last = is_active(node, node.id), last_step(node)
    asking, left, known, exchanges, averagings, told = _begin(node)
    patience = patience_s(node, 2) if node.life else None
    computing: Task[GradientResult | None] | None = None
    partner: int | None = None
    seen: deque[int] = deque()  # averagings at the start of each gradient that is held
    read_at = averagings
    while site.held:  # what an earlier head was holding: its exchange is over
        site.apply_next()
    may_exchange, owed = site.step > 0 or config.exchanges_per_step == 0, False

    while site.step < last or site.held or partner is not None or asking:
        if site.unsettled and len(site.held) < 2:
            site.sync()
            owed, told = False, averagings
        if computing is None and len(site.held) < 2 and site.step < last:
            computing = node.start(site.mean_gradient(site.x, site.step))
            read_at = averagings
        if active and partner is None and may_exchange and site.step < last:
            partner = _partner(node, exchanges, left, known)
            if partner is not None:
                exchanges, may_exchange = exchanges + 1, config.exchanges_per_step == 0
                node.send(partner, Ask(exchanges, site.x))
        news = node.receive(Ask, Reply, Elsewhere, Finished, Leaving, *NEWS)
        m = await node.first(news, *([computing] if computing else []), timeout_s=patience)
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
        elif isinstance(m, Reply | Elsewhere) and m.sender == partner and m.exchange == exchanges:
            partner = None
            if isinstance(m, Reply):
                site.x, averagings = average(site.x, m.parameters), averagings + 1
            else:
                known[site_of(m.head, config.learners_per_site)], may_exchange = m.head, False
        elif isinstance(m, Gone | Back | Finished | Leaving):
            asking.discard(m.sender)
            partner = None if m.sender == partner else partner
            left |= {m.sender} if isinstance(m, Leaving) else set()
            if isinstance(m, Back) and not active and is_active(node, m.sender):
                asking.add(m.sender)
        elif m is None and partner is not None:
            left, partner = left | {partner}, None
        elif m is None and site.step >= last:
            break
        site.members.hear(m if isinstance(m, Message) else None)
        if site.unsettled and computing is not None:
            computing.cancel()
            computing = None
        applied = bool(site.held) and partner is None
        while site.held and partner is None:
            G = site.apply_next()
            may_exchange = True
            node.record(train_loss=G.loss, staleness=averagings - seen.popleft())
            node.publish(site.x, step=site.step - len(site.held))
        if owed and not site.unsettled and len(site.held) < 2:
            site.order(changed=averagings != told)
            owed, told = False, averagings
        if applied and not site.unsettled:
            counts = {"exchanges": exchanges, "averagings": averagings, "told": told}
            await node.save(**site.kept(), asking=sorted(asking), left=sorted(left), known=known, **counts)
    if site.unsettled:
        site.sync()
    await site.end(changed=averagings != told)


def _begin(node: Node) -> tuple[set[int], set[int], dict[int, int], int, int, int]:
    """Who may ask, who has left, heads as heard of by site, exchanges and averagings made, and how many of
    these the site has been told of."""
    s = node.saved
    if node.life or s is None or "exchanges" not in s:
        living = set(node.fleet.living(_learners(node, active=True)))
        asking = set() if is_active(node, node.id) else living
        return asking, set(), {}, node.life << 32, 0, 0  # replies to an earlier life are told apart
    counts = s["exchanges"], s["averagings"], s["told"]
    return set(s["asking"]), set(s["left"]), dict(s["known"]), *counts


def is_active(node: Node, j: int) -> bool:
    """Whether node j's site asks: odd sites do, even ones answer."""
    return site_of(j, node.config.learners_per_site) % 2 == 1


def _learners(node: Node, *, active: bool) -> list[int]:
    return [j for j in node.fleet.ids() if is_active(node, j) == active]


def _partner(node: Node, exchange: int, left: set[int], known: dict[int, int]) -> int | None:
    """The head of a living passive site, as AD-PSGD chooses it; None where there is none."""
    size = node.config.learners_per_site
    living = heads(node, range(0, len(node.fleet.ids()) // size, 2), size, left, known)
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
    messages=(Ask, Reply, Elsewhere, Finished, Leaving, Chunk, *MESSAGES),
    config=HADPSGDConfig,
    ends_with=("learner",),
    needs="complete",
    evaluates="each",
    prepare=refuse_impossible,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(ALL_FINITE, answers(Ask, Reply)),
)
