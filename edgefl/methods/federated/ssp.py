"""SSP, stale synchronous parallel (Ho et al. 2013, https://papers.nips.cc/paper/4894).

x: parameters at the server; a clock: read x, train, push the change u, x <- x + u. Client i has completed
c_i clocks (0 at first) and may begin its next one iff c_i - min_j c_j <= s. What it reads then has every
change of all clients' first c_i - s clocks and all its own. So completed clocks differ by s + 1 at most: s
at a start, one more when the fastest has finished.
Choices: a clock is [train]'s local steps; changes are scaled by 1/N (`scale`). A client is given the model
at each clock's start, at once if the rule allows, else in the instant in which the minimum moves. reads =
"newest" may hold more than the rule asks for; "complete" holds the complete clocks of all and its own
changes, summed in order of id: with s = 0 that is BSP. One that is gone leaves the minimum, and its changes
stay; one that returns enters at the minimum. The server saves when the minimum moves; after a restart it
gives everybody the model anew. A round of [stop] is a clock of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Back, Faults, Gone, Message, Method, MethodConfig, Node
from edgefl.parameters import Vector
from edgefl.patterns.clocks import Clocks, Reads
from edgefl.patterns.compression import Sent, Uplink
from edgefl.patterns.reports import FINITE, MOST_NORM, Intake, answers


class ClockConfig(MethodConfig):
    """How changes are taken."""

    scale: Literal["mean", "sum"] = "mean"
    """A change counts 1/N, or in full."""
    max_update_norm: float = Field(default=MOST_NORM, gt=0)
    """Larger changes of a client are refused: its clock counts, its change does not."""


class SSPConfig(ClockConfig):
    """The bound and what a read holds."""

    max_ahead: int = Field(default=3, ge=0)
    """s: how far a client may be ahead of the slowest when it begins a clock; [stop] rounds: never waits."""
    reads: Reads = "newest"


@dataclass(frozen=True)
class View(Message):
    """clock: the one that the receiver is to do; turn: how often it has been given a model; counted: the turn
    of its last change that counted."""

    newest_by = ("sender",)
    clock: int
    parameters: Vector
    turn: int
    counted: int


@dataclass(frozen=True)
class Push(Message):
    """u: what a clock changed; given, turn: the server's life and the turn in which it gave the model."""

    once_by = ("sender", "life", "given", "turn")
    given: int
    turn: int
    change: Sent
    loss: float


async def serve(node: Node, *, s: int, reads: Reads) -> Vector:
    """The server of SSP with bound s, and of BSP."""
    clocks, stop = Clocks(node, reads), node.num_rounds
    share = 1 / len(node.fleet.ids("client")) if node.config.scale == "mean" else 1.0
    intake = Intake(node, node.config.max_update_norm)
    while stop is None or clocks.low < stop:
        for k in [k for k in clocks.waiting if clocks.done[k] - clocks.low <= s and clocks.done[k] != stop]:
            node.record(ahead=clocks.done[k] - clocks.low, blocked_s=clocks.begin(k))
            node.send(k, View(clocks.done[k], clocks.view(k), clocks.turns[k], clocks.counted.get(k, -1)))
        m: Push | Gone | Back = await node.receive(Push, Gone, Back)
        k = m.sender
        if isinstance(m, Gone):
            if k in clocks.active and k not in clocks.waiting:
                node.record(lost=1)
            clocks.leave(k)
        elif isinstance(m, Back):
            clocks.enter(k)
        elif m.given == node.life and m.turn == clocks.turns[k] and k in clocks.active:
            u = intake.change(k, m.change, clocks.x.layout)
            clocks.push(k, None if u is None else u * share)
            if u is None:
                node.record(refused=1)
            node.record(completed_ahead=clocks.done[k] - clocks.low, train_loss=m.loss)
        else:
            node.record(dropped=1)  # of an earlier life, of the client's or the server's
        if clocks.advance():
            node.record(round=clocks.low - 1)
            node.publish(clocks.x, step=clocks.low)
            await node.save(**clocks.state())
    return clocks.x


async def server(node: Node) -> Vector:
    config: SSPConfig = node.config
    return await serve(node, s=config.max_ahead, reads=config.reads)


async def client(node: Node) -> None:
    assert node.data is not None
    uplink = Uplink(node)
    while True:
        m = await node.receive(View)
        uplink.settle(m.counted)
        r: Trained = await node.compute(LocalSGD(m.parameters, node.data, m.clock, node.workload))
        u = uplink.change(r.parameters - m.parameters, tag=m.turn)
        await uplink.save()
        node.send(m.sender, Push(m.life, m.turn, u, r.loss))


METHOD = Method(
    name="ssp",
    title="Stale synchronous parallel parameter server",
    paper="Ho et al. 2013, https://papers.nips.cc/paper/4894",
    roles={"server": server, "client": client},
    messages=(View, Push),
    config=SSPConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(View, Push)),
    stateless=("client",),
)
