"""DivShare (Biswas et al. 2025, https://arxiv.org/abs/2410.12918; algorithm as in the authors' artifact).

x: flat model; Omega: fragmentation fraction; K = max(1, floor(1/Omega)) fragments, S_0 .. S_{K-1} their
index sets, the same everywhere; J recipients per fragment. Each iteration: H local steps (one Work item,
[train]); refill the out-queue with K J pairs (peer, x restricted to S_j) in random order, dropping what is
unsent; average every coordinate over what has arrived, x[p] <- (x[p] + sum over R_p) / (1 + |R_p|).
Fragments are sent beside training; a newer fragment of the same sender and number replaces the older one.

Choices. Omega = 0.1; all start equal; batches go on where the last iteration stopped. The message under way
is finished and only the queue dropped (the artifact closes its connections). Sums in ascending (sender,
fragment). The index sets are keyed by the run's seed and travel in no message. Buffers never travel: take
models without batch norm. One that returns goes on from its last iteration; what is sent to a dead peer
is lost, and nobody waits for anybody.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from edgefl.errors import ConfigError
from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Faults, Message, Method, MethodConfig, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Layout, Vector
from edgefl.patterns.out_queue import OutQueue
from edgefl.patterns.reports import ALL_FINITE


class DivShareConfig(MethodConfig):
    """Omega and J; H, the batch and the rate are [train]'s."""

    fragment_fraction: float = Field(default=0.1, gt=0, le=1)
    """Omega: a fragment's share of the model."""
    recipients: int = Field(default=6, ge=1)
    """J: peers that each fragment is sent to, below the number of peers."""


@dataclass(frozen=True)
class Fragment(Message):
    newest_by = ("sender", "fragment")
    fragment: int
    iteration: int
    values: Tensor


def index_sets(layout: Layout, K: int, rng: np.random.Generator) -> list[Tensor]:
    """S_0 .. S_{K-1}: disjoint index sets that cover the vector, each with about 1/K of every tensor.

    Of each tensor a random permutation is cut into K slices of floor(numel / K); the last takes the rest.
    """
    parts: list[list[np.ndarray]] = [[] for _ in range(K)]
    for entry in layout.entries:
        permuted = entry.offset + rng.permutation(entry.numel)
        each = entry.numel // K
        for j in range(K):
            parts[j].append(permuted[j * each : (j + 1) * each if j < K - 1 else None])
    return [torch.from_numpy(np.sort(np.concatenate(part))) for part in parts]


def num_fragments(config: DivShareConfig) -> int:
    """K = max(1, floor(1 / Omega)); the small term guards rounding only."""
    return max(1, int(1 / config.fragment_fraction + 1e-9))


async def peer(node: Node) -> Vector:
    K = num_fragments(node.config)
    S = index_sets(node.model.layout, K, node.shared_rng("divshare fragments"))
    return await share(node, S, drop_unsent=True)


async def share(node: Node, S: list[Tensor], *, drop_unsent: bool) -> Vector:
    """Train, refill the out-queue, average over what has come; S: the index sets of the fragments."""
    assert node.data is not None
    saved = node.saved or {"x": node.model.init(), "it": 0, "state": None}
    x: Vector = saved["x"]
    state = saved["state"]
    out = OutQueue(node)
    for it in node.rounds(saved["it"]):
        r: Trained = await node.compute(LocalSGD(x, node.data, it, node.workload, state=state))
        x, state = r.parameters, r.state
        fresh = fresh_queue(node, S, x, it)
        out.replace(fresh) if drop_unsent else out.extend(fresh)
        x = aggregate(x, node.take(Fragment), S)
        node.record(round=it, train_loss=r.loss, queued=len(out))
        node.publish(x, step=it + 1)
        await node.save(x=x, it=it + 1, state=state)
    return x


def fresh_queue(node: Node, S: list[Tensor], x: Vector, it: int) -> list[tuple[int, Fragment]]:
    """All K J pairs of a recipient and a fragment of x, shuffled; none for a node that is alone."""
    rng = node.rng("recipients", it)
    others = [j for j in node.fleet.ids() if j != node.id]
    J = min(node.config.recipients, len(others))
    queue = [
        (int(p), fragment)
        for fragment in (Fragment(j, it, x[S_j]) for j, S_j in enumerate(S))
        for p in rng.choice(others, J, replace=False)
    ]
    return [queue[k] for k in rng.permutation(len(queue))]


def aggregate(x: Vector, fragments: list[Fragment], S: list[Tensor]) -> Vector:
    """Average each coordinate over x and the fragments that hold it."""
    if not fragments:
        return x
    total, count = x.values.clone(), torch.ones_like(x.values)
    for m in sorted(fragments, key=lambda m: (m.sender, m.fragment)):
        total[S[m.fragment]] += m.values
        count[S[m.fragment]] += 1
    return x.with_values(total / count)


def refuse_recipients(plan: RunPlan, least: int = 1) -> None:
    """Refuse more recipients than there are peers, or than the least that a method can do with."""
    found, n = plan.config.recipients, len(plan.nodes)
    most = max(n - 1, least)
    if n > 1 and found > most:
        raise ConfigError(f"method.{plan.method.name}.recipients", found, f"at most {most} with {n} nodes")


def _refuse_impossible(plan: RunPlan) -> None:
    refuse_recipients(plan)
    assert plan.learner is not None
    d = plan.learner.model.layout.size
    if num_fragments(plan.config) > d:
        key, found = "method.divshare.fragment_fraction", plan.config.fragment_fraction
        raise ConfigError(key, found, f"at least 1 / {d}: a fragment is one of {d} parameters or more")


METHOD = Method(
    name="divshare",
    title="Asynchronous decentralized learning with model fragments",
    paper="Biswas et al. 2025, https://arxiv.org/abs/2410.12918",
    roles={"peer": peer},
    messages=(Fragment,),
    config=DivShareConfig,
    ends_with=("peer",),
    needs="complete",
    evaluates="each",
    prepare=_refuse_impossible,
    tolerates=Faults(crashes=True, returns=True, partitions=True, silence=True),
    invariants=(ALL_FINITE,),
)
