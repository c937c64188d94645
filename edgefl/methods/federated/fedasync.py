"""FedAsync (Xie, Koyejo, Gupta 2019, Algorithm 1, https://arxiv.org/abs/1903.03934).

x: parameters; t: server version; u = t - tau: staleness of an update that started from version tau, counted
before the merge; on each arrival alpha_t = alpha s(u), x <- (1 - alpha_t) x + alpha_t y, t <- t + 1. A client
minimises f_k(y) + (rho/2) ||y - x_tau||^2.
Choices: a round of [stop] is as many updates as there are clients; all clients are at work at a time unless
`concurrency` says less; with max_staleness an older update is dropped and counted, and its sender gets
the current model. A client that is gone ends its own chain only; one that returns downloads anew, and work
that its earlier life was given counts but frees nobody. A version that the server lost in a crash is fresh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Back, Faults, Gone, Message, Method, MethodConfig, Node
from edgefl.parameters import Vector


class FedAsyncConfig(MethodConfig):
    """alpha, s, rho; the local training is [train]'s."""

    mixing_weight: float = Field(default=0.6, gt=0, le=1)
    """alpha: share of a fresh update in the new model."""
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    """s(u): 1; (1 + u)^-a; or 1 up to u = b, then 1 / (a (u - b) + 1)."""
    staleness_a: float | None = Field(default=None, gt=0)
    """a: 0.5 for polynomial and 10 for hinge where not given."""
    staleness_b: int = Field(default=4, ge=0)
    """b: updates that a hinge forgives."""
    proximal_rho: float = Field(default=0.005, ge=0)
    """rho: weight of the proximal term of local training."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Older updates are dropped."""
    concurrency: int | None = Field(default=None, ge=1)
    """Most clients at work at a time."""


@dataclass(frozen=True)
class GlobalModel(Message):
    newest_by = ("sender",)
    version: int
    turn: int
    parameters: Vector


@dataclass(frozen=True)
class Update(Message):
    version: int
    turn: int
    parameters: Vector
    loss: float


def discount(config: FedAsyncConfig, u: int) -> float:
    """s(u), the factor by which staleness shrinks an update's weight.

    >>> discount(FedAsyncConfig(staleness="hinge"), 4), discount(FedAsyncConfig(staleness="hinge"), 5)
    (1.0, 0.09090909090909091)
    """
    a, b = config.staleness_a, config.staleness_b
    if config.staleness == "polynomial":
        return float((1 + u) ** -(0.5 if a is None else a))
    if config.staleness == "hinge" and u > b:
        return 1 / ((10 if a is None else a) * (u - b) + 1)
    return 1.0


async def server(node: Node) -> Vector:
    config: FedAsyncConfig = node.config
    clients = node.fleet.ids("client")
    saved = node.saved or {"x": node.model.init(), "t": 0, "turns": {}, "life": -1}
    x: Vector = saved["x"]
    t, turns = saved["t"], dict(saved["turns"])
    resting, working = dict.fromkeys(clients), set[int]()
    if saved["life"] == node.life:  # in a new life nobody is known to be at work
        resting, working = dict.fromkeys(saved["resting"]), set(saved["working"])

    def hand_out() -> None:
        """Give the current model to those who rest, as far as concurrency allows."""
        while resting and len(working) < (config.concurrency or len(clients)):
            k = next(iter(resting))
            del resting[k]
            if node.fleet.alive(k):
                working.add(k)
                turns[k] = turns.get(k, -1) + 1  # how often k has been given a model
                node.send(k, GlobalModel(t, turns[k], x))

    for r in node.rounds(t // len(clients)):
        while t < (r + 1) * len(clients):
            hand_out()
            m = await node.receive(Update, Gone, Back)
            if isinstance(m, Update):
                u = max(0, t - m.version)
                if config.max_staleness is not None and u > config.max_staleness:
                    node.record(staleness=u, dropped=1)
                else:
                    x = x.lerp(m.parameters, config.mixing_weight * discount(config, u))
                    t += 1
                    node.record(staleness=u, train_loss=m.loss)
                    node.publish(x, step=t)
                if m.turn != turns.get(m.sender):
                    continue
            working.discard(m.sender)
            if not isinstance(m, Gone):
                resting[m.sender] = None
        at_work = {"resting": tuple(resting), "working": tuple(sorted(working)), "life": node.life}
        await node.save(x=x, t=t, turns=dict(turns), **at_work)
    return x


async def client(node: Node) -> None:
    assert node.data is not None
    while True:
        m = await node.receive(GlobalModel)
        work = LocalSGD(m.parameters, node.data, m.turn, node.workload, proximal_mu=node.config.proximal_rho)
        r: Trained = await node.compute(work)
        node.send(m.sender, Update(m.version, m.turn, r.parameters, r.loss))


METHOD = Method(
    name="fedasync",
    title="Asynchronous federated optimization",
    paper="Xie, Koyejo, Gupta 2019, https://arxiv.org/abs/1903.03934",
    roles={"server": server, "client": client},
    messages=(GlobalModel, Update),
    config=FedAsyncConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    stateless=("client",),
)
