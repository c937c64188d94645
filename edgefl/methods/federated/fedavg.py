"""FedAvg (McMahan et al. 2017, Algorithm 1, https://arxiv.org/abs/1602.05629).

w: parameters; S_t: cohort of round t; n_k: examples held by client k; E epochs, batch B, step eta (in
[train]). Differs from the paper: a round ends at its deadline, or when as many as were wanted have
reported, and averages whoever reported; a report that comes later is dropped and counted; with fewer
than min_reports the round is void and the parameters stay; while no client lives the server waits for
one to return.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Faults, Message, Method, MethodConfig, Node
from edgefl.parameters import Vector, WeightedMean
from edgefl.patterns.gather import gather
from edgefl.patterns.rounds import cohort, somebody_alive


class FedAvgConfig(MethodConfig):
    """C and the rules of a round; E, B and eta are [train]'s."""

    client_fraction: float = Field(default=1.0, gt=0, le=1)
    """C: share of the clients in a round's cohort, at least one client."""
    over_selection: float = Field(default=0.0, ge=0)
    """o: choose ceil((1 + o) m) clients and close the round at the m-th report (Bonawitz et al. 2019)."""
    round_deadline_s: float | None = Field(default=None, gt=0)
    """Seconds from the start of a round to its end, whoever has reported; None: wait for all that live."""
    min_reports: int = Field(default=1, ge=1)
    """Fewest reports that make a round count."""
    weighting: Literal["samples", "uniform"] = "samples"
    """A report's weight in the mean: n_k, or 1."""


@dataclass(frozen=True)
class GlobalModel(Message):
    newest_by = ("sender",)
    round: int
    parameters: Vector


@dataclass(frozen=True)
class LocalModel(Message):
    stale_by = "round"
    once_by = ("sender", "life", "round")
    round: int
    parameters: Vector
    num_examples: int
    loss: float


async def server(node: Node) -> Vector:
    config: FedAvgConfig = node.config
    clients = node.fleet.ids("client")
    saved = node.saved or {"w": node.model.init(), "round": 0}
    w: Vector = saved["w"]
    wanted = max(round(config.client_fraction * len(clients)), 1)
    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        S_t = cohort(node.rng("cohort", t), clients, math.ceil((1 + config.over_selection) * wanted))
        node.send(S_t, GlobalModel(t, w))
        mean = WeightedMean(w.layout)
        losses = []
        async for r in gather(node, LocalModel, S_t, round=t, timeout_s=config.round_deadline_s):
            mean.add(r.parameters, r.num_examples if config.weighting == "samples" else 1)  # n_k / sum n_k
            losses.append(r.loss)
            if len(losses) == wanted:
                break
        if len(losses) >= config.min_reports:
            w = mean.value(otherwise=w)
        node.record(round=t, reports=len(losses), missing=len(S_t) - len(losses), train_loss=_mean(losses))
        node.publish(w, step=t + 1)
        await node.save(w=w, round=t + 1)
    return w


async def client(node: Node) -> None:
    assert node.data is not None
    while True:
        m = await node.receive(GlobalModel)
        work = LocalSGD(m.parameters, node.data, m.round, node.workload)  # E, B, eta
        r: Trained = await node.compute(work)
        node.send(m.sender, LocalModel(m.round, r.parameters, len(node.data), r.loss))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


METHOD = Method(
    name="fedavg",
    title="Federated averaging",
    paper="McMahan et al. 2017, https://arxiv.org/abs/1602.05629",
    roles={"server": server, "client": client},
    messages=(GlobalModel, LocalModel),
    config=FedAvgConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    stateless=("client",),
)
