"""FedAsync (Xie, Koyejo, Gupta 2019, Algorithm 1, https://arxiv.org/abs/1903.03934).

x: parameters; t: server version; u = t - tau: staleness of an update that started from version tau, counted
before the merge; on each arrival alpha_t = alpha s(u), x <- (1 - alpha_t) x + alpha_t y, t <- t + 1. A client
minimises f_k(y) + (rho/2) ||y - x_tau||^2.
Choices: a round of [stop] is as many updates as there are clients; all clients are at work at a time unless
`concurrency` says less; with max_staleness an older update is dropped and counted, and its sender gets
the current model. A client that is gone ends its own chain only; one that returns downloads anew, and work
that its earlier life was given counts but frees nobody. A version that the server lost in a crash is fresh.
[compress]: updates carry y - x_tau, packed; the server keeps x_tau while it is out, and refuses an update
whose x_tau it no longer knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import Field

from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Back, Faults, Gone, Message, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.asynchronous import Chains, Merge, StalenessConfig, discount
from edgefl.patterns.compression import Sent, Uplink
from edgefl.patterns.reports import FINITE, Intake, answers, is_finite


class FedAsyncConfig(StalenessConfig):
    """alpha, s, rho; the local training is [train]'s."""

    mixing_weight: float = Field(default=0.6, gt=0, le=1)
    """alpha: share of a fresh update in the new model."""
    proximal_rho: float = Field(default=0.005, ge=0)
    """rho: weight of the proximal term of local training."""


@dataclass(frozen=True)
class GlobalModel(Message):
    """turn: how often the receiver has been given a model; counted: that of its last update that counted."""

    newest_by = ("sender",)
    version: int
    parameters: Vector
    turn: int
    counted: int


@dataclass(frozen=True)
class Update(Message):
    """parameters: y, or what the method makes of it; given, version, turn: the server's life in which it gave
    the model that this began from, its version, and which of the client's it was."""

    once_by = ("sender", "life", "given", "turn")
    given: int
    version: int
    turn: int
    parameters: Sent
    loss: float


def whole_model(x: Vector, t: int, k: int, turn: int, counted: int) -> Message:
    """What client k is given: all of x, version t."""
    return GlobalModel(t, x, turn, counted)


async def serve(
    node: Node,
    merge: Merge,
    *,
    keep_starts: bool,
    offer: Callable[[Vector, int, int, int, int], Message] = whole_model,
    kind: type[Any] = Update,
) -> Vector:
    """The server's loop, for FedAsync and its siblings with another merge.

    offer(x, t, k, turn, counted): what client k is given of x, version t. kind: of the updates.
    """
    clients = node.fleet.ids("client")
    saved = node.saved or {"x": node.model.init(), "t": 0, "taken": 0}
    x: Vector = saved["x"]
    t, taken = saved["t"], saved["taken"]
    chains = Chains(node, clients, saved, keep=keep_starts)
    intake = Intake(node, node.config.max_update_norm)
    for r in node.rounds(taken // len(clients)):
        while taken < (r + 1) * len(clients):
            chains.hand_out(x, partial(offer, x, t))
            m: Any = await node.receive(kind, Gone, Back)
            if isinstance(m, Gone):
                chains.lose(m.sender)
                continue
            if isinstance(m, kind):
                if not chains.was_given(m.sender, m.given, m.turn):
                    intake.refuse(m.sender, "it answers no model that it was given")
                    node.record(refused=1)
                    continue
                current = chains.is_current(m.sender, m.given, m.turn)
                start = chains.starts.get(m.sender) if current else None
                u = max(0, t - m.version)
                if node.config.max_staleness is not None and u > node.config.max_staleness:
                    node.record(staleness=u, dropped=1)
                elif (update := merge.opened(intake, m, x, start)) is None:
                    node.record(refused=1)
                else:
                    new, taken = merge.take(x, update, u), taken + 1
                    chains.counted[m.sender] = m.turn
                    node.record(staleness=u, train_loss=m.loss)
                    if new is not None and is_finite(new):
                        x, t = new, t + 1
                        node.publish(x, step=t)
                if not current:
                    continue
            chains.rest(m.sender)
        await node.save(x=x, t=t, taken=taken, merge=merge.state(), **chains.state())
    return x


class Mix:
    """x <- (1 - alpha s(u)) x + alpha s(u) y."""

    def __init__(self, config: StalenessConfig, mixing_weight: float) -> None:
        self._config, self._alpha = config, mixing_weight

    def opened(self, intake: Intake, m: Update, x: Vector, start: Vector | None) -> Vector | None:
        if isinstance(m.parameters, Vector):
            return intake.model(m.sender, m.parameters, x)
        if start is None:
            intake.refuse(m.sender, "the model that it began from is not known any more")
            return None
        return intake.model(m.sender, m.parameters, start)

    def take(self, x: Vector, update: Vector, u: int) -> Vector:
        return x.lerp(update, self._alpha * discount(self._config, u))

    def state(self) -> Any:
        return None


async def server(node: Node) -> Vector:
    return await serve(node, Mix(node.config, node.config.mixing_weight), keep_starts=node.compress.on)


async def client(node: Node) -> None:
    assert node.data is not None
    uplink = Uplink(node)
    while True:
        m = await node.receive(GlobalModel)
        uplink.settle(m.counted)
        work = LocalSGD(m.parameters, node.data, m.turn, node.workload, proximal_mu=node.config.proximal_rho)
        r: Trained = await node.compute(work)
        y = uplink.model(r.parameters, m.parameters, tag=m.turn)
        await uplink.save()
        node.send(m.sender, Update(m.life, m.version, m.turn, y, r.loss))


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
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, Update)),
    stateless=("client",),
)
