"""FedCore (Guo et al. 2024, https://arxiv.org/abs/2402.00219).

w: parameters; m_i: examples of client i; c_i: how many of them it trains on in a second; E local epochs.
theta, the epoch deadline: the (100 - s)-th percentile of m_i / c_i over all clients, taken once; tau, the
round deadline: E theta. A client with m_i / c_i > tau sits the round out. Each other one makes an ordinary
epoch; then E - 1 more, as in FedAvg, where m_i / c_i <= theta. A straggler makes these on a coreset of b_i =
ceil((c_i tau - m_i) / (E - 1)) examples, as many as fit into what is left of tau: the k-medoids of the
examples' gradients at the last layer, class by class, each weighted with the number that it stands for.
Server: w <- sum_R m_i y_i / sum_R m_i over those R that reported.
Choices: c_i follows from the planned seconds of an epoch; transfers are beside tau. Choosing a coreset takes
the device's time, and unless asked for b_i is not made smaller for it. tau is a target: clients are cut, as
lost, at 1.5 tau, the transfers and the longest choosing, or at round_deadline_s. A client whose first epoch
took longer than planned goes by what it took. The optimiser begins anew on the coreset. With a proximal term
(mu, which the authors' code has) all of a round's steps are drawn to the w that it began from; their code
draws those on the coreset to where they began. Rounds as in our FedAvg, which s = 0 is; FedProx with mu.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.learning.coreset import Coreset, SelectCoreset, has_last_layer, random_coreset
from edgefl.learning.work import LocalSGD, Trained
from edgefl.methods.federated.fedavg import LocalModel
from edgefl.methods.federated.fedprox import refuse_divergence
from edgefl.nodes import Faults, Message, Method, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector, WeightedMean
from edgefl.patterns.compression import Counted, Uplink
from edgefl.patterns.gather import gather
from edgefl.patterns.reports import FINITE, Intake, answers
from edgefl.patterns.rounds import (
    Round,
    RoundConfig,
    Stop,
    somebody_alive,
    unless_stopped,
)

CUT = 1.5
"""Round deadlines after which a client counts as lost: quotas, smaller last batches and choosing a coreset
make stragglers somewhat late."""
LATE = 1.05
"""How many times longer than planned a first epoch takes before its measured time counts instead: what varies
less than that, the cut has room for."""


class FedCoreConfig(RoundConfig):
    """s, what stragglers do, and the rules of a round; E, B and eta are [train]'s."""

    straggler_share: float = Field(default=0.1, ge=0, lt=1)
    """s / 100: share of the clients for which a round deadline is too short for E epochs."""
    stragglers: Literal["coreset", "random-coreset", "sit-out"] = "coreset"
    """What they do after their first epoch, or that they sit every round out."""
    feature_coreset: bool = False
    """Clients for which one epoch is too long train on a coreset alone, chosen by the examples' inputs."""
    charge_selection_to_deadline: bool = False
    """Take the planned time of choosing a coreset off what is left of the deadline."""
    selection_s_per_pair: float | None = Field(default=None, ge=0)
    """kappa: seconds of choosing per pair of examples of one class, on any device; counted in operations and
    bytes where None."""
    proximal_mu: float = Field(default=0.0, ge=0)
    """mu: weight of FedProx's proximal term in local training."""
    watch_clock: bool = True
    """Go by the time that the first epoch took where it is longer than planned."""


@dataclass(frozen=True)
class AskSpeed(Message):
    """The server begins."""

    newest_by = ("sender",)


@dataclass(frozen=True)
class Speed(Message):
    """Planned seconds of the sender: m_i / c_i, of one epoch; and at most of choosing a coreset."""

    newest_by = ("sender",)
    epoch_s: float
    selection_s: float


@dataclass(frozen=True)
class GlobalModel(Message):
    """epoch_deadline_s: theta. counted: the round of the receiver's last report that counted, where
    [compress] remembers; else -1."""

    newest_by = ("sender",)
    round: int
    parameters: Vector
    epoch_deadline_s: float
    counted: int = -1


@dataclass(frozen=True)
class SitsOut(Message):
    """The sender has no part in this round."""

    stale_by = "round"
    once_by = ("sender", "life", "round")
    round: int


async def speeds(node: Node, clients: Sequence[int], intake: Intake) -> list[Speed]:
    """What the clients that live say of themselves, one at least."""
    found: list[Speed] = []
    while not found:
        await somebody_alive(node, clients)
        node.send(clients, AskSpeed())
        async for m in gather(node, Speed, clients):
            if m.epoch_s > 0 and m.selection_s >= 0 and math.isfinite(m.epoch_s + m.selection_s):
                found.append(m)
            else:
                intake.refuse(m.sender, f"it claims {m.epoch_s} s for an epoch, {m.selection_s} s to choose")
    return found


def deadlines(node: Node, found: Sequence[Speed]) -> tuple[float, float]:
    """theta, and after how many seconds the lost clients of a round are given up, transfers apart: 1.5 tau,
    and what stragglers may need to choose."""
    theta = float(np.quantile([m.epoch_s for m in found], 1 - node.config.straggler_share))
    selection_s = max((m.selection_s for m in found if m.epoch_s > theta), default=0.0)
    return theta, CUT * node.workload.epochs * theta + selection_s


def transfers_s(node: Node, clients: Collection[int], nbytes: int) -> float:
    """Planned seconds of a round's transfers: the longest way there and back, and the server's own line with
    all of them on it."""
    fleet, here = node.fleet, node.fleet.access(node.id)
    ways = [
        fleet.latency_s(node.id, k)
        + nbytes / fleet.rate_bytes_per_s(node.id, k)
        + fleet.latency_s(k, node.id)
        + nbytes / fleet.rate_bytes_per_s(k, node.id)
        for k in clients
    ]
    return max(ways) + len(ways) * nbytes * (1 / here.up_bytes_per_s + 1 / here.down_bytes_per_s)


def opened(intake: Intake, S_t: Round, w: Vector, r: LocalModel | SitsOut) -> tuple[Vector, int] | None:
    """The model and the weight of a report; None where it is refused, or says that its sender sits out."""
    if isinstance(r, SitsOut):
        S_t.excused.append(r.sender)
        return None
    y = intake.report(w, r)
    return None if y is None else (y, r.num_examples)


async def server(node: Node) -> Vector:
    clients, config = node.fleet.ids("client"), node.config
    intake = Intake(node, config.max_update_norm)
    saved = node.saved
    if saved is None:
        theta, cut_s = deadlines(node, await speeds(node, clients, intake))
        saved = {"w": node.model.init(), "round": 0, "theta": theta, "cut_s": cut_s, "counted": {}}
        await node.save(**saved)
    w: Vector = saved["w"]
    theta, cut_s, counted = saved["theta"], saved["cut_s"], Counted(node, saved["counted"])
    deadline_s = config.round_deadline_s or cut_s + transfers_s(node, clients, w.nbytes)
    rules = config.model_copy(update={"round_deadline_s": deadline_s})
    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        S_t, mean = Round(node, t, clients, intake, rules), WeightedMean(w.layout)
        counted.send(S_t.cohort, partial(GlobalModel, t, w, theta))
        async for _, (y_i, m_i) in S_t.reports((LocalModel, SitsOut), partial(opened, intake, S_t, w)):
            mean.add(y_i, m_i)  # m_i / sum m_j
        if S_t.counts:
            w = mean.value(otherwise=w)
        S_t.record(sat_out=len(S_t.excused))
        counted.add(S_t.counted, t)
        node.publish(w, step=t + 1)
        await node.save(w=w, round=t + 1, theta=theta, cut_s=cut_s, counted=counted.state())
    return w


class LocalTraining:
    """A client's part in a round.

    epoch_s: m_i / c_i, the planned seconds of an epoch; selection_s: at most of choosing a coreset.
    """

    def __init__(self, node: Node) -> None:
        assert node.data is not None
        self._node, self._data, self._config = node, node.data, node.config
        self._E, self._per_epoch = node.workload.epochs, node.data.steps_per_epoch(node.workload.batch_size)
        epoch = LocalSGD(node.model.init(), node.data, 0, node.workload, part=range(self._per_epoch))
        self.epoch_s, self.selection_s = node.fleet.work_s(node.id, epoch), 0.0
        if self._config.stragglers == "coreset":
            every = self._select(node.model.init(), len(node.data))
            self.selection_s = node.fleet.work_s(node.id, every)

    async def round(self, m: GlobalModel) -> Trained | SitsOut | None:
        """What the round comes to; None when the server closes it first."""
        theta, config = m.epoch_deadline_s, self._config
        if self.epoch_s > theta and config.stragglers == "sit-out":
            return SitsOut(m.round)
        if self.epoch_s > self._E * theta:
            return await self._without_an_epoch(m) if config.feature_coreset else SitsOut(m.round)
        begun_s = self._node.now()
        first = await self._train(m, range(self._per_epoch))
        if first is None or self._E == 1:
            return first
        took_s = self._node.now() - begun_s
        epoch_s = took_s if config.watch_clock and took_s > LATE * self.epoch_s else self.epoch_s
        if epoch_s <= theta:
            rest = await self._train(m, range(self._per_epoch, self._E * self._per_epoch), first)
            return None if rest is None else _joined(first, rest)
        select = self._select(first.parameters)
        b_i = self._size(select, epoch_s, self._E * theta - epoch_s, self._E - 1)
        if b_i == 0:
            return first
        rest = await self._on_coreset(replace(select, size=b_i), m, self._E - 1)
        return None if rest is None else _joined(first, rest)

    async def _without_an_epoch(self, m: GlobalModel) -> Trained | SitsOut | None:
        """All epochs on a coreset that is chosen before any."""
        select = self._select(m.parameters, by="inputs")
        b_i = self._size(select, self.epoch_s, self._E * m.epoch_deadline_s, self._E)
        return await self._on_coreset(replace(select, size=b_i), m, self._E) if b_i else SitsOut(m.round)

    async def _train(self, m: GlobalModel, part: range, after: Trained | None = None) -> Trained | None:
        """These steps of the round on all examples, from the round's start or after an earlier part."""
        node = self._node
        y, state = (m.parameters, None) if after is None else (after.parameters, after.state)
        mu, w = self._config.proximal_mu, m.parameters
        work = LocalSGD(y, self._data, m.round, node.workload, mu, state, anchor=w, part=part)
        return await unless_stopped(node, work, m.round)  # type: ignore[no-any-return]

    def _select(
        self, y: Vector, size: int = 0, by: Literal["gradients", "inputs"] = "gradients"
    ) -> SelectCoreset:
        kappa = self._config.selection_s_per_pair
        return SelectCoreset(y, self._data, size, by, seconds_per_pair=kappa)

    def _size(self, select: SelectCoreset, epoch_s: float, left_s: float, epochs: int) -> int:
        """b_i: so many examples fit into the seconds left, `epochs` times over."""
        b_i = coreset_size(len(self._data), epoch_s, left_s, epochs, whole=select.by == "inputs")
        if self._config.charge_selection_to_deadline and self._config.stragglers == "coreset":
            left_s -= self._node.fleet.work_s(self._node.id, replace(select, size=b_i)) if b_i else 0.0
            b_i = coreset_size(len(self._data), epoch_s, left_s, epochs, whole=select.by == "inputs")
        return b_i

    async def _on_coreset(self, select: SelectCoreset, m: GlobalModel, epochs: int) -> Trained | None:
        """Choose the coreset and make so many epochs on it, with the optimiser anew."""
        node, t, mu = self._node, m.round, self._config.proximal_mu
        if self._config.stragglers == "coreset":
            core: Coreset | None = await unless_stopped(node, select, t)
        else:
            core = random_coreset(self._data, select.size, node.rng("coreset", t))
        if core is None:
            return None
        workload = node.workload.model_copy(update={"epochs": epochs})
        y, data = select.parameters, core.of(self._data)
        work = LocalSGD(y, data, t, workload, proximal_mu=mu, anchor=m.parameters)
        return await unless_stopped(node, work, t)  # type: ignore[no-any-return]


def coreset_size(m: int, epoch_s: float, left_s: float, epochs: int, *, whole: bool) -> int:
    """How many examples fit into left_s seconds if each is seen `epochs` times, at m in epoch_s; at least 0.

    Rounded up, or down where they must fit whole; but never for the rounding of the seconds.

    >>> [coreset_size(100, 2.0, left_s, 3, whole=False) for left_s in (1.5, 1.51, -1.0)]
    [25, 26, 0]
    """
    fits = m * left_s / epoch_s / epochs
    return max(0, math.floor(fits + 1e-9) if whole else math.ceil(fits - 1e-9))


def _joined(first: Trained, rest: Trained) -> Trained:
    """Two parts of a round as one."""
    steps = first.num_steps + rest.num_steps
    loss = (first.loss * first.num_steps + rest.loss * rest.num_steps) / steps
    return Trained(rest.parameters, loss, steps)


async def client(node: Node) -> None:
    assert node.data is not None
    training, uplink = LocalTraining(node), Uplink(node)
    while True:
        m = await node.receive(AskSpeed, GlobalModel)
        if isinstance(m, AskSpeed):
            node.send(m.sender, Speed(training.epoch_s, training.selection_s))
        if not isinstance(m, GlobalModel):
            continue
        uplink.settle(m.counted)
        r = await training.round(m)
        if isinstance(r, SitsOut):
            node.send(m.sender, r)
        elif r is not None:
            y_i = uplink.model(r.parameters, m.parameters, tag=m.round)
            await uplink.save()
            node.send(m.sender, LocalModel(m.round, y_i, len(node.data), r.num_steps, r.loss))


def prepare(plan: RunPlan) -> None:
    """Refuse rounds that are not counted in epochs, and models without a last layer to go by."""
    refuse_divergence(plan)
    assert plan.learner is not None
    model, config = plan.learner.model, plan.config
    for k in plan.ids("client"):
        steps = plan.nodes[k].workload.steps
        if steps is not None:
            raise ConfigError("train.local_steps", steps, "fedcore counts in epochs: give train.local_epochs")
    if config.stragglers != "sit-out" and not has_last_layer(model):
        raise ConfigError("model.name", model.name, "fedcore needs a classifier that ends in a dense layer")


METHOD = Method(
    name="fedcore",
    title="Federated averaging with coresets for stragglers",
    paper="Guo et al. 2024, https://arxiv.org/abs/2402.00219",
    roles={"server": server, "client": client},
    messages=(AskSpeed, Speed, GlobalModel, LocalModel, SitsOut, Stop),
    config=FedCoreConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=prepare,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, LocalModel)),
    stateless=("client",),
)
