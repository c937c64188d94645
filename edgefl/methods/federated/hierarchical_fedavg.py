"""Hierarchical FedAvg (Liu et al. 2020, Algorithm 1, https://arxiv.org/abs/1905.06641).

Roles: the cloud ("server"), edges, clients. kappa1: local steps between two edge averages ([train]'s local
steps or epochs); every kappa2 edge averages the cloud averages the edges. An edge weighs its clients with
n_k and the cloud an edge with the samples under it that reported. Edge models go back to the edge's
clients, the cloud's to all.
Choices: FedAvg's rules hold at both levels, with a deadline of its own at the cloud. An edge weighs what
reported in its last edge round. Momentum is carried from edge round to edge round and begins anew with a
cloud round. Clients belong to edges in equal runs of ids; those of an edge that is gone go to the edges
that are left with the next cloud round, and back when it returns. A round of [stop] is a cloud round.
[compress]: clients send y_k - w and edges their change in a cloud round, packed. The cloud knows which
reports of clients and of edges came into its model, and says so: what went with a lost edge is sent again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.learning.work import LocalSGD, Trained
from edgefl.methods.federated.fedavg import LocalModel
from edgefl.nodes import Faults, Message, Method, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector, WeightedMean
from edgefl.patterns.compression import Sent, Uplink
from edgefl.patterns.reports import FINITE, Intake, answers
from edgefl.patterns.rounds import Round, RoundConfig, Stop, somebody_alive, unless_stopped

Ids = tuple[int, ...]


class HierarchicalConfig(RoundConfig):
    """FedAvg's rules, for the rounds of an edge; how many edges, kappa2, and the cloud's deadline."""

    num_edges: int = Field(default=2, ge=1, le=10_000)
    edge_rounds: int = Field(default=2, ge=1)
    """kappa2: edge averages in a cloud round."""
    cloud_deadline_s: float | None = Field(default=None, gt=0)
    """Seconds from the start of a cloud round to its end, whichever edges have reported."""


@dataclass(frozen=True)
class CloudModel(Message):
    """clients: those of the receiving edge in this cloud round; counted: their last edge rounds that count.

    edge_counted: the receiver's last cloud round that counts. -1: none, or [compress] remembers nothing.
    """

    newest_by = ("sender",)
    round: int
    parameters: Vector
    clients: tuple[int, ...]
    counted: tuple[int, ...]
    edge_counted: int


@dataclass(frozen=True)
class EdgeModel(Message):
    """round: counts edge rounds; first: of a cloud round; counted: the receiver's last that counts, or -1."""

    newest_by = ("sender",)
    round: int
    parameters: Vector
    first: bool
    counted: int = -1


@dataclass(frozen=True)
class EdgeReport(Message):
    """num_examples: of the clients in the mean, 0 where none reported; num_steps: edge rounds.

    clients, counted: the edge rounds of those whose reports have come into the model, where they have.
    """

    stale_by = "round"
    once_by = ("sender", "life", "round")
    round: int
    parameters: Sent
    num_examples: int
    loss: float
    clients: tuple[int, ...]
    counted: tuple[int, ...]
    num_steps: int


def attached(
    clients: tuple[int, ...], edges: tuple[int, ...], alive: list[int]
) -> dict[int, tuple[int, ...]]:
    """Each living edge's clients: equal runs of ids, those of edges that are gone dealt to the others.

    >>> attached((3, 4, 5, 6), (1, 2), [2])
    {2: (3, 4, 5, 6)}
    """
    of: dict[int, list[int]] = {e: [] for e in alive}
    for i, k in enumerate(clients):
        home = edges[i * len(edges) // len(clients)]
        of[home if home in of else alive[i % len(alive)]].append(k)
    return {e: tuple(mine) for e, mine in of.items()}


async def cloud(node: Node) -> Vector:
    config: HierarchicalConfig = node.config
    edges, clients = node.fleet.ids("edge"), node.fleet.ids("client")
    saved = node.saved or {"w": node.model.init(), "round": 0, "counted": {}}
    w: Vector = saved["w"]
    counted: dict[int, int] = dict(saved["counted"])
    intake = Intake(node, config.max_update_norm)
    rules = RoundConfig(round_deadline_s=config.cloud_deadline_s)
    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        await somebody_alive(node, edges)
        members = attached(clients, edges, [e for e in edges if node.fleet.alive(e)])
        for e, mine in members.items():
            known = tuple(counted.get(k, -1) for k in mine)
            node.send(e, CloudModel(t, w, mine, known, counted.get(e, -1)))
        S_t, mean = Round(node, t, tuple(members), intake, rules), WeightedMean(w.layout)
        async for r, y in S_t.reports(EdgeReport, partial(_of_edge, intake, w)):
            mean.add(y, r.num_examples)
            if node.compress.remembers:
                counted |= dict(zip(r.clients, r.counted, strict=False))
                counted |= {r.sender: t} if r.num_examples else {}
        w = mean.value(otherwise=w)
        S_t.record()
        node.publish(w, step=t + 1)
        await node.save(w=w, round=t + 1, counted=dict(counted))
    return w


def _of_edge(intake: Intake, w: Vector, r: EdgeReport) -> Vector | None:
    """An edge's model; one of nobody's has no weight and is no mistake."""
    return w if r.num_examples == 0 else intake.report(w, r)


async def edge(node: Node) -> None:
    last: tuple[int, Sent, int, float, Ids, Ids] | None = (node.saved or {}).get("last")
    intake, uplink = Intake(node, node.config.max_update_norm), Uplink(node)
    while True:
        m = await node.receive(CloudModel)
        if last is None or last[0] != m.round:  # a cloud that lost its last round asks for it again
            uplink.settle(m.edge_counted)
            w, num_examples, loss, ids, counted = await _cloud_round(node, m, intake)
            change = uplink.model(w, m.parameters, tag=m.round)
            last = (m.round, change, num_examples, loss, ids, counted)
        node.send(m.sender, EdgeReport(*last, node.config.edge_rounds))
        await uplink.save(last=last)


async def _cloud_round(node: Node, m: CloudModel, intake: Intake) -> tuple[Vector, int, float, Ids, Ids]:
    """An edge's rounds within a cloud round: the model, the examples behind it, the last loss, who counts
    since when."""
    w, num_examples, loss = m.parameters, 0, 0.0
    counted = dict(zip(m.clients, m.counted, strict=False))
    for j in range(node.config.edge_rounds):
        mine = [k for k in m.clients if node.fleet.alive(k)]
        if not mine:
            break
        S_t = Round(node, m.round * node.config.edge_rounds + j, mine, intake)
        if node.compress.remembers:
            for k in S_t.cohort:
                node.send(k, EdgeModel(S_t.t, w, j == 0, counted[k]))
        else:
            node.send(S_t.cohort, EdgeModel(S_t.t, w, j == 0))
        mean, losses = WeightedMean(w.layout), 0.0
        async for r, y in S_t.reports(LocalModel, partial(intake.report, w)):
            mean.add(y, r.num_examples)
            losses += r.loss
        if any(S_t.absent.values()):
            node.record(**S_t.absent)
        if S_t.counts:
            w, num_examples, loss = mean.value(otherwise=w), int(mean.weight), losses / mean.count
            counted |= dict.fromkeys(S_t.counted, S_t.t)
    return w, num_examples, loss, tuple(counted), tuple(counted.values())


async def client(node: Node) -> None:
    assert node.data is not None
    state = (node.saved or {}).get("state")
    uplink = Uplink(node)
    while True:
        m = await node.receive(EdgeModel)
        uplink.settle(m.counted)
        work = LocalSGD(m.parameters, node.data, m.round, node.workload, state=None if m.first else state)
        r: Trained | None = await unless_stopped(node, work, m.round)
        if r is None:
            continue
        state = r.state
        y_k = uplink.model(r.parameters, m.parameters, tag=m.round)
        await uplink.save(**({} if state is None else {"state": state}))
        node.send(m.sender, LocalModel(m.round, y_k, len(node.data), r.num_steps, r.loss))


def _helpers(config: HierarchicalConfig) -> tuple[str, ...]:
    return ("server", *["edge"] * config.num_edges)


def _refuse_idle_edges(plan: RunPlan) -> None:
    clients, edges = len(plan.ids("client")), plan.config.num_edges
    if edges > clients:
        raise ConfigError(
            "method.hierarchical-fedavg.num_edges", edges, f"at most {clients}, a client for each"
        )


METHOD = Method(
    name="hierarchical-fedavg",
    title="Federated averaging at edges and in the cloud",
    paper="Liu et al. 2020, https://arxiv.org/abs/1905.06641",
    roles={"server": cloud, "edge": edge, "client": client},
    messages=(CloudModel, EdgeModel, LocalModel, EdgeReport, Stop),
    config=HierarchicalConfig,
    helpers=_helpers,
    ends_with=("server",),
    needs="complete",
    evaluates="server",
    compresses=True,
    prepare=_refuse_idle_edges,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(EdgeModel, LocalModel)),
    stateless=("client",),
)
