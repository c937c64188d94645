"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1, https://arxiv.org/abs/1910.06378).

x: parameters; c: the server's control variate; c_i: client i's, all 0 at first; N clients, R those of a
round whose reports count. A client makes K steps from y = x, y <- y - eta (g_i(y) - c_i + c). Then option
I: c_i+ = g_i(x), the gradient of all its data at the server's model; option II: c_i+ = c_i - c + (x - y) /
(K eta). It sends dy = y - x and dc = c_i+ - c_i. Server: x <- x + eta_g mean_R dy, c <- c + (1/N) sum_R dc,
so that c stays the mean of all c_i.
Choices: uniform weights, as in the paper. A client takes c_i+ for its c_i when the server tells it, with
the next model, that its report counted: c is the mean of what the clients hold also when reports are late
or lost. Client state is saved before it is sent. A client that lost its c_i cannot repair the sum: it says
so and is refused, unless the server keeps copies, which restore it a round later. [compress]: dy is packed
with error feedback; dc as a difference to c_i, and what was sent of it is what c_i moves by, so that c stays
the mean of what the clients hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.learning.work import Gradient, GradientResult, LocalSGD, Trained
from edgefl.nodes import Faults, Message, Method, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector, WeightedMean
from edgefl.patterns.compression import Sent, Uplink, contracted, opened, packed_difference
from edgefl.patterns.reports import FINITE, Intake, answers
from edgefl.patterns.rounds import (
    Round,
    RoundConfig,
    Stop,
    refuse_void_rounds,
    somebody_alive,
    unless_stopped,
)


class ScaffoldConfig(RoundConfig):
    """FedAvg's rules of a round, eta_g, and how control variates are made."""

    server_rate: float = Field(default=1.0, gt=0)
    """eta_g."""
    option: Literal["I", "II"] = "II"
    """c_i+: a gradient at the server's model (a pass over the data more), or the mean of those on the way."""
    server_keeps_controls: bool = False
    """The server holds a copy of each c_i, N vectors, for clients that lose theirs."""


@dataclass(frozen=True)
class GlobalModel(Message):
    """counted: the round of the receiver's last report that counted, -1 none; restored: its c_i, if it lost
    it."""

    newest_by = ("sender",)
    round: int
    parameters: Vector
    control: Vector
    counted: int
    restored: Vector | None = None


@dataclass(frozen=True)
class Change(Message):
    """dy and dc; None from a client that lost its control variate."""

    stale_by = "round"
    once_by = ("sender", "life", "round")
    round: int
    change: Sent | None
    control: Sent | None
    loss: float


def zeros(like: Vector) -> Vector:
    """A vector of zeros in the same layout."""
    return like * 0.0


async def server(node: Node) -> Vector:
    clients, config = node.fleet.ids("client"), node.config
    x: Vector = node.model.init()
    start: dict[str, Any] = {"x": x, "c": zeros(x), "round": 0, "counted": {}, "copies": {}, "forgetful": ()}
    saved = node.saved or start
    x, c = saved["x"], saved["c"]
    counted, copies, forgetful = dict(saved["counted"]), dict(saved["copies"]), set(saved["forgetful"])
    intake = Intake(node, config.max_update_norm)

    def check(m: Change) -> tuple[Vector, Vector] | None:
        if m.change is None or m.control is None:
            forgetful.add(m.sender)
            intake.refuse(m.sender, "it lost its control variate")
            return None
        dy = intake.change(m.sender, m.change, x.layout)
        dc = None if dy is None else intake.change(m.sender, m.control, x.layout)
        return None if dy is None or dc is None else (dy, contracted(node.compress, dc))

    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        S_t = Round(node, t, clients, intake)
        for k in S_t.cohort:
            restored = copies.get(k) if k in forgetful else None
            node.send(k, GlobalModel(t, x, c, counted.get(k, -1), restored))
        forgetful.clear()
        dx, dc = WeightedMean(x.layout), WeightedMean(x.layout)
        reported: dict[int, Vector] = {}
        async for m, (dy_k, dc_k) in S_t.reports(Change, check):
            dx.add(dy_k)
            dc.add(dc_k)
            reported[m.sender] = dc_k
        if S_t.counts:
            x = x + dx.value(otherwise=zeros(x)) * config.server_rate
            c = c + dc.value(otherwise=zeros(x)) * (len(reported) / len(clients))
            counted |= dict.fromkeys(reported, t)
            if config.server_keeps_controls:
                copies |= {k: copies.get(k, zeros(x)) + dc_k for k, dc_k in reported.items()}
        S_t.record()
        node.publish(x, step=t + 1)
        known = {"counted": dict(counted), "copies": dict(copies), "forgetful": tuple(sorted(forgetful))}
        await node.save(x=x, c=c, round=t + 1, **known)
    return x


class Control:
    """A client's c_i: the one that it holds, and the one that it will hold if its report counts."""

    def __init__(self, node: Node, like: Vector, uplink: Uplink) -> None:
        saved = node.saved or {"held": zeros(like), "held_since": -1, "next": None, "sent": -1}
        self._uplink = uplink
        self.held: Vector = saved["held"]
        self._held_since, self._next, self._sent = saved["held_since"], saved["next"], saved["sent"]

    def settle(self, m: GlobalModel) -> bool:
        """Hear which report counted last. False: this node has lost its c_i."""
        self._uplink.settle(m.counted)
        if m.restored is not None:
            self.held, self._held_since, self._next = m.restored, m.counted, None
        elif self._next is not None and m.counted == self._sent:
            self.held, self._held_since, self._next = self._next, self._sent, None
        return bool(m.counted == self._held_since)

    async def save(self, new: Vector, t: int) -> None:
        """Keep c_i+ beside c_i, and what is not sent of dy, before they are sent in round t."""
        self._next, self._sent = new, t
        await self._uplink.save(held=self.held, held_since=self._held_since, next=new, sent=t)


async def client(node: Node) -> None:
    assert node.data is not None
    uplink = Uplink(node)
    c_i = Control(node, node.model.init(), uplink)
    while True:
        m = await node.receive(GlobalModel)
        if not c_i.settle(m):
            node.send(m.sender, Change(m.round, None, None, 0.0))
            continue
        x, c = m.parameters, m.control
        work = LocalSGD(x, node.data, m.round, node.workload, correction=c - c_i.held)
        r: Trained | None = await unless_stopped(node, work, m.round)
        if r is None:
            continue
        if node.config.option == "I":
            whole = node.workload.model_copy(update={"batch_size": len(node.data)})
            g: GradientResult = await node.compute(Gradient(x, node.data, m.round, whole))
            new = g.gradient
        else:
            K_eta = r.num_steps * work.rate(node.learner)
            new = c_i.held - c + (x - r.parameters) / K_eta
        dy, dc = uplink.change(r.parameters - x, m.round), packed_difference(node, new - c_i.held, m.round)
        if node.compress.on:
            new = c_i.held + contracted(node.compress, opened(node, dc, x.layout))
        await c_i.save(new, m.round)
        node.send(m.sender, Change(m.round, dy, dc, r.loss))


def _refuse_what_bends_the_path(plan: RunPlan) -> None:
    """Option II is the mean of the gradients on the way for plain SGD only."""
    refuse_void_rounds(plan)
    assert plan.learner is not None
    train = plan.learner.train
    plain = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}
    for key, value in plain.items():
        if plan.config.option == "II" and getattr(train, key) != value:
            accepted = f"{'none' if value is None else value} with scaffold's option II; option I takes it"
            raise ConfigError(f"train.{key}", getattr(train, key), accepted)


METHOD = Method(
    name="scaffold",
    title="Stochastic controlled averaging",
    paper="Karimireddy et al. 2020, https://arxiv.org/abs/1910.06378",
    roles={"server": server, "client": client},
    messages=(GlobalModel, Change, Stop),
    config=ScaffoldConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    compresses=True,
    prepare=_refuse_what_bends_the_path,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, Change)),
    stateless=("client",),
)
