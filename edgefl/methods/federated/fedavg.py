"""FedAvg (McMahan et al. 2017, Algorithm 1, https://arxiv.org/abs/1602.05629).

w: parameters; S_t: cohort of round t, m = max(round(C N), 1) of N clients; y_k: what client k trains from w
with E epochs, batch B, step eta (in [train]); n_k: its examples. w <- sum_R n_k y_k / sum_R n_k over those R
of S_t whose reports count, as the paper's last versions have it.
Delta form, the same for eta_g = 1 and weights that sum to 1: w <- w + eta_g sum_R w_k (y_k - w). With unequal
n_k the mean over a cohort is a biased estimate of the mean over all; weighting "unbiased" is not,
w_k = (N/m) n_k / sum n, whose sum is 1 in expectation only.
Choices: a round ends at its deadline, or with over-selection at the m-th report (Bonawitz et al. 2019); both
favour fast clients. Those still at work are then told to stop: they leave their stale work before a newer
model comes. A report that was on its way is dropped and counted; with fewer than min_reports the round is
void and w stays; an update that is refused changes nothing. While no client lives the server waits for one
to return. [compress]: reports carry y_k - w, packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic import Field

from edgefl.data import LocalData
from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Faults, Message, Method, Node
from edgefl.parameters import Vector, WeightedMean
from edgefl.patterns.aggregates import Rule
from edgefl.patterns.compression import Counted, Sent, Uplink
from edgefl.patterns.reports import FINITE, Intake, answers, is_finite
from edgefl.patterns.rounds import (
    Round,
    RoundConfig,
    Stop,
    refuse_void_rounds,
    somebody_alive,
    unless_stopped,
)


class FedAvgConfig(RoundConfig):
    """C, the rules of a round, and the weights; E, B and eta are [train]'s."""

    weighting: Literal["samples", "uniform", "unbiased"] = "samples"
    """w_k, up to their sum: n_k, or 1; or (N/m) n_k / sum n as it is."""
    server_rate: float = Field(default=1.0, gt=0)
    """eta_g: how far the model goes towards the mean."""


@dataclass(frozen=True)
class GlobalModel(Message):
    """counted: the round of the receiver's last report that counted, where [compress] remembers; else -1."""

    newest_by = ("sender",)
    round: int
    parameters: Vector
    counted: int = -1


@dataclass(frozen=True)
class LocalModel(Message):
    """num_steps: local steps that were made."""

    stale_by = "round"
    once_by = ("sender", "life", "round")
    round: int
    parameters: Sent
    num_examples: int
    num_steps: int
    loss: float


async def serve(node: Node, rule: Rule) -> Vector:
    """The rounds of FedAvg, and of its siblings with another rule."""
    clients = node.fleet.ids("client")
    saved = node.saved or {"w": node.model.init(), "round": 0, "state": None, "counted": {}}
    w: Vector = saved["w"]
    state, counted = saved["state"], Counted(node, saved["counted"])
    intake = Intake(node, node.config.max_update_norm)
    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        S_t = Round(node, t, clients, intake)
        counted.send(S_t.cohort, partial(GlobalModel, t, w))
        aggregate = rule(node, w, state)
        async for r, y in S_t.reports(LocalModel, partial(intake.report, w)):
            aggregate.add(r, y)
        new = aggregate.value() if S_t.counts else None
        if new is not None and is_finite(new[0]):
            w, state = new
        elif new is not None:
            node.note("void", f"round {t}: the new model would not be finite")
        S_t.record()
        counted.add(S_t.counted, t)
        node.publish(w, step=t + 1)
        await node.save(w=w, round=t + 1, state=state, counted=counted.state())
    return w


class Mean:
    """The weighted mean of what was reported, or a step of eta_g towards it: FedAvg's rule."""

    def __init__(self, node: Node, w: Vector, state: Any) -> None:
        self.node, self.w, self.state = node, w, state
        self._mean = WeightedMean(w.layout)

    def add(self, r: LocalModel, y: Vector) -> None:
        self._mean.add(y, 1 if self.node.config.weighting == "uniform" else r.num_examples)  # n_k / sum n_k

    def value(self) -> tuple[Vector, Any] | None:
        rate, mean = self.node.config.server_rate * self._sum_of_weights(), self._mean.value(otherwise=self.w)
        return (mean if rate == 1 else self.w + (mean - self.w) * rate), None

    def change(self) -> Vector:
        """sum_R w_k (y_k - w)."""
        change = self._mean.value(otherwise=self.w) - self.w
        return change if self._sum_of_weights() == 1 else change * self._sum_of_weights()

    def _sum_of_weights(self) -> float:
        if self.node.config.weighting != "unbiased":
            return 1.0
        clients, fleet = self.node.fleet.ids("client"), self.node.fleet
        total = sum(map(fleet.num_examples, clients))
        return len(clients) * self._mean.weight / (self._mean.count * total)


async def server(node: Node) -> Vector:
    return await serve(node, Mean)


async def client(node: Node) -> None:
    assert node.data is not None
    uplink = Uplink(node)
    while True:
        await _answer(node, node.data, uplink, await node.receive(GlobalModel))


async def _answer(node: Node, data: LocalData, uplink: Uplink, m: GlobalModel) -> None:
    """A client's part in a round; between rounds it holds no model."""
    uplink.settle(m.counted)
    work = LocalSGD(m.parameters, data, m.round, node.workload)  # E, B, eta
    r: Trained | None = await unless_stopped(node, work, m.round)
    if r is not None:
        y_k = uplink.model(r.parameters, m.parameters, tag=m.round)
        await uplink.save()
        node.send(m.sender, LocalModel(m.round, y_k, len(data), r.num_steps, r.loss))


METHOD = Method(
    name="fedavg",
    title="Federated averaging",
    paper="McMahan et al. 2017, https://arxiv.org/abs/1602.05629",
    roles={"server": server, "client": client},
    messages=(GlobalModel, LocalModel, Stop),
    config=FedAvgConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_void_rounds,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, LocalModel)),
    stateless=("client",),
)
