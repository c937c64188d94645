"""AdaComm (Wang and Joshi 2019, https://arxiv.org/abs/1810.08313).

w: parameters; tau: local steps between two averages. All clients make tau steps of SGD from w, the server
waits for all of them, and w is the plain mean of what they come to. Every T_0 seconds the server takes the
loss F and sets tau <- ceil(sqrt(F / F_0) tau_0), F_0 the loss at the start; where that would not lower tau,
tau <- ceil(tau / 2). So training begins with few averages and ends with many.
Choices: T_0 is ADSP's check period, the loss that of examples that no client trains on, and a round waits for
its evaluation. Mini-batches of round t are those t tau, ..., (t + 1) tau - 1 of a client's stream. Cohorts,
deadlines, void rounds and [compress] as in our FedAvg.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import Field

from edgefl.learning.work import Evaluate, LocalSGD, Trained
from edgefl.nodes import Faults, Message, Method, Node
from edgefl.parameters import Vector, WeightedMean
from edgefl.patterns.commit_rate import check_period_s
from edgefl.patterns.compression import Counted, Sent, Uplink
from edgefl.patterns.reports import FINITE, Intake, answers
from edgefl.patterns.rounds import (
    Round,
    RoundConfig,
    Stop,
    refuse_void_rounds,
    somebody_alive,
    unless_stopped,
)


class FixedConfig(RoundConfig):
    """The rules of a round, and how long it is; batch and step are [train]'s."""

    period_steps: int = Field(default=40, ge=1)
    """tau: local steps between two averages; AdaComm's tau_0."""


class AdaCommConfig(FixedConfig):
    """Where tau begins, and when it changes."""

    interval_s: float | None = Field(default=None, gt=0)
    """T_0: seconds from change to change; None: 30 planned steps of the median device."""
    num_held_out: int = Field(default=256, ge=1)
    """Test examples that the server takes its loss from."""


@dataclass(frozen=True)
class GlobalModel(Message):
    """steps: tau; counted: the round of the receiver's last report that counted, where [compress] remembers,
    else -1."""

    newest_by = ("sender",)
    round: int
    steps: int
    parameters: Vector
    counted: int = -1


@dataclass(frozen=True)
class LocalModel(Message):
    """What tau steps came to."""

    stale_by = "round"
    once_by = ("sender", "life", "round")
    round: int
    parameters: Sent
    loss: float


class Fixed:
    """tau as it is: Fixed AdaComm."""

    def __init__(self, node: Node, saved: dict[str, Any] | None) -> None:
        self.steps: int = node.config.period_steps

    async def settle(self, w: Vector) -> None:
        """Decide how many steps the next round has."""

    def state(self) -> dict[str, Any]:
        """For a save."""
        return {}


class Adaptive(Fixed):
    """tau by the loss. first_loss: F_0; next_s: when it is looked at again."""

    def __init__(self, node: Node, saved: dict[str, Any] | None) -> None:
        super().__init__(node, saved)
        self._node, self._most = node, self.steps
        self._interval_s = check_period_s(node, node.config.interval_s)
        self._held_out = node.fleet.held_out(node.config.num_held_out)
        s = saved or {"steps": self.steps, "first_loss": None, "next_s": 0.0}
        self.steps = s["steps"]
        self._first_loss: float | None = s["first_loss"]
        self._next_s: float = s["next_s"]

    async def settle(self, w: Vector) -> None:
        if self._node.now() < self._next_s:
            return
        self._next_s = self._node.now() + self._interval_s
        loss = (await self._node.compute(Evaluate(w, self._held_out))).loss
        if self._first_loss is None:
            self._first_loss = loss
        elif math.isfinite(loss):
            self.steps = fewer(self.steps, self._most, loss / self._first_loss)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "first_loss": self._first_loss, "next_s": self._next_s}


def fewer(tau: int, tau_0: int, share: float) -> int:
    """The next tau, where the loss is this share of the first one.

    >>> fewer(40, 40, 0.25), fewer(20, 40, 0.25), fewer(1, 40, 0.25), fewer(40, 40, 2.0)
    (20, 10, 1, 20)
    """
    wanted = math.ceil(math.sqrt(share) * tau_0)
    return max(1, wanted if wanted < tau else math.ceil(tau / 2))


async def serve(node: Node, kind: type[Fixed]) -> Vector:
    """The rounds of AdaComm, and of Fixed AdaComm with another rule for tau."""
    clients = node.fleet.ids("client")
    saved = node.saved or {"w": node.model.init(), "round": 0, "tau": None, "counted": {}}
    w: Vector = saved["w"]
    counted = Counted(node, saved["counted"])
    tau, intake = kind(node, saved["tau"]), Intake(node, node.config.max_update_norm)

    def check(r: LocalModel) -> Vector | None:
        return intake.model(r.sender, r.parameters, w)

    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        await tau.settle(w)
        S_t = Round(node, t, clients, intake)
        counted.send(S_t.cohort, partial(GlobalModel, t, tau.steps, w))
        mean = WeightedMean(w.layout)
        async for _, y in S_t.reports(LocalModel, check):
            mean.add(y)
        if S_t.counts:
            w = mean.value(otherwise=w)
        S_t.record()
        counted.add(S_t.counted, t)
        node.record(local_steps=tau.steps)
        node.publish(w, step=t + 1)
        await node.save(w=w, round=t + 1, tau=tau.state(), counted=counted.state())
    return w


async def server(node: Node) -> Vector:
    return await serve(node, Adaptive)


async def client(node: Node) -> None:
    assert node.data is not None
    uplink = Uplink(node)
    while True:
        m = await node.receive(GlobalModel)
        uplink.settle(m.counted)
        workload = node.workload.model_copy(update={"steps": m.steps})
        work = LocalSGD(m.parameters, node.data, m.round, workload)
        r: Trained | None = await unless_stopped(node, work, m.round)
        if r is not None:
            y = uplink.model(r.parameters, m.parameters, tag=m.round)
            await uplink.save()
            node.send(m.sender, LocalModel(m.round, y, r.loss))


METHOD = Method(
    name="adacomm",
    title="Local SGD with an adaptive communication period",
    paper="Wang and Joshi 2019, https://arxiv.org/abs/1810.08313",
    roles={"server": server, "client": client},
    messages=(GlobalModel, LocalModel, Stop),
    config=AdaCommConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_void_rounds,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, LocalModel)),
    stateless=("client",),
)
