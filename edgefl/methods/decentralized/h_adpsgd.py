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
        await Head(node, site).lead()
    node.send(_learners(node, active=not active), Finished() if active else Leaving())
    return site.x


async def _deflect(node: Node, site: Site) -> None:
    """Send on who takes this learner for the head."""
    while True:
        m = await node.receive(Ask)
        node.send(m.sender, Elsewhere(m.exchange, site.members.ids[0]))


class Head:
    """The head of a site: AD-PSGD's worker, whose gradients are the site's.

    asking: active learners that may still ask. left: who has left for good, as far as it has heard. known:
    heads of other sites, by site. exchanges, averagings: so many asked for, and made. told: averagings that
    the site has heard of. partner: of the exchange that is open.
    """

    def __init__(self, node: Node, site: Site) -> None:
        self.node, self.site = node, site
        self.config: HADPSGDConfig = node.config
        self.active, self.last = is_active(node, node.id), last_step(node)
        self.asking, self.left, self.known, self.exchanges, self.averagings, self.told = _begin(node)
        self.patience_s = patience_s(node, 2) if node.life else None
        self.computing: Task[GradientResult | None] | None = None
        self.partner: int | None = None
        self.seen: deque[int] = deque()
        """Averagings at the start of each gradient that is held."""
        self.read_at = self.averagings
        self.owed = False
        """Whether the site is to be told what to do with a gradient."""

    async def lead(self) -> None:
        """The head's loop, until all steps are applied and nobody asks any more."""
        site = self.site
        while site.held:  # what an earlier head was holding: its exchange is over
            site.apply_next()
        self.may_exchange = site.step > 0 or self.config.exchanges_per_step == 0
        while site.step < self.last or site.held or self.partner is not None or self.asking:
            self._set_going()
            news = self.node.receive(Ask, Reply, Elsewhere, Finished, Leaving, *NEWS)
            computing = [self.computing] if self.computing else []
            m = await self.node.first(news, *computing, timeout_s=self.patience_s)
            if m is self.computing and self.computing is not None:
                self._computed(self.computing)
            elif isinstance(m, Message):
                self._hear(m)
            elif self.partner is not None:
                self.left, self.partner = self.left | {self.partner}, None
            elif site.step >= self.last:
                break
            site.members.hear(m if isinstance(m, Message) else None)
            await self._settle()
        if site.unsettled:
            site.sync()
        await site.end(changed=self.averagings != self.told)

    def _set_going(self) -> None:
        """Bring the site together where it has changed, begin a gradient, and ask for an exchange."""
        site, more = self.site, self.site.step < self.last
        if site.unsettled and len(site.held) < 2:
            site.sync()
            self.owed, self.told = False, self.averagings
        if self.computing is None and len(site.held) < 2 and more:
            self.computing = self.node.start(site.mean_gradient(site.x, site.step))
            self.read_at = self.averagings
        if self.active and self.partner is None and self.may_exchange and more:
            self.partner = _partner(self.node, self.exchanges, self.left, self.known)
            if self.partner is not None:
                self.exchanges += 1
                self.may_exchange = self.config.exchanges_per_step == 0
                self.node.send(self.partner, Ask(self.exchanges, site.x))

    def _computed(self, computing: Task[GradientResult | None]) -> None:
        """Hold the site's mean gradient; None: a learner was lost, and the step is made again."""
        self.computing = None
        if computing.value is not None:
            self.site.held.append(computing.value)
            self.seen.append(self.read_at)
            self.site.step, self.owed = self.site.step + 1, True

    def _hear(self, m: Message) -> None:
        """What another site's head says, or who has gone, come back or finished."""
        site = self.site
        if isinstance(m, Ask):
            self.node.send(m.sender, Reply(m.exchange, site.x))
            site.x, self.averagings = average(m.parameters, site.x), self.averagings + 1
            self.node.publish(site.x, step=site.step - len(site.held))
        elif isinstance(m, Reply | Elsewhere) and m.sender == self.partner and m.exchange == self.exchanges:
            self.partner = None
            if isinstance(m, Reply):
                site.x, self.averagings = average(site.x, m.parameters), self.averagings + 1
            else:
                self.known[site_of(m.head, self.config.learners_per_site)] = m.head
                self.may_exchange = False
        elif isinstance(m, Gone | Back | Finished | Leaving):
            self.asking.discard(m.sender)
            self.partner = None if m.sender == self.partner else self.partner
            if isinstance(m, Leaving):
                self.left.add(m.sender)
            if isinstance(m, Back) and not self.active and is_active(self.node, m.sender):
                self.asking.add(m.sender)

    async def _settle(self) -> None:
        """Apply what is held where no exchange is open, give the order that is owed, and save."""
        site = self.site
        if site.unsettled and self.computing is not None:
            self.computing.cancel()
            self.computing = None
        applied = bool(site.held) and self.partner is None
        while site.held and self.partner is None:
            G = site.apply_next()
            self.may_exchange = True
            self.node.record(train_loss=G.loss, staleness=self.averagings - self.seen.popleft())
            self.node.publish(site.x, step=site.step - len(site.held))
        if self.owed and not site.unsettled and len(site.held) < 2:
            site.order(changed=self.averagings != self.told)
            self.owed, self.told = False, self.averagings
        if applied and not site.unsettled:
            await self.node.save(
                **site.kept(), asking=sorted(self.asking), left=sorted(self.left), known=self.known,
                exchanges=self.exchanges, averagings=self.averagings, told=self.told,
            )  # fmt: skip


def _begin(node: Node) -> tuple[set[int], set[int], dict[int, int], int, int, int]:
    """What a Head begins with, in its order: anew in each life, or where it was saved."""
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
