"""SGP: stochastic gradient push (Assran, Loizou, Ballas, Rabbat 2019, Algorithm 1,
https://arxiv.org/abs/1811.10792).

x_i: node i's numerator; w_i: its weight, 1 at first; z_i = x_i / w_i: its model. Step k of node i: h = x_i -
eta g_i(z_i); the shares p_ji h and p_ji w_i go to its out-neighbors j of this step; x_i and w_i become the
sums of what came and of its own shares. p_ji = 1 / (1 + out-degree of i): a sender need know its own
out-degree only, so edges may have one direction. Averaging alone is push-sum (Kempe, Dobra, Gehrke 2003,
https://doi.org/10.1109/SFCS.2003.1238221): sum x and sum w stay, and all z come to their ratio.

Graphs: exponential is the paper's: i sends to i + 2^(k mod L) mod n, L = floor(log2(n - 1)) + 1. Each node
has one in-neighbor there, so that w stays 1: D-PSGD, with updated models mixed. random is push-sum's own:
each draws whom it sends to. `edges` names any other. Choices: local_steps of [train] above 1 make that many
SGD steps in place of one gradient. Steps are synchronous; the paper's variant that overlaps them is not
here. The share of a receiver that is gone stays with its sender, and one that it never got comes back there.
What is lost with a node is x and w together, so that z keeps its meaning. One that returns brings back what
it had saved (patterns/edges.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgefl.errors import ConfigError, Unreachable
from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Faults, Message, Method, MethodConfig, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.patterns.edges import MESSAGES, Edges
from edgefl.patterns.reports import ALL_FINITE


class SGPConfig(MethodConfig):
    """Who sends to whom; eta and B are [train]'s."""

    graph: Literal["exponential", "random"] = "exponential"
    """One receiver a step: at distances 1, 2, 4, ... in turn, or drawn."""
    edges: tuple[tuple[int, int], ...] = ()
    """In place of `graph`: pairs [i, j], i sends to j at every step."""


@dataclass(frozen=True)
class Push(Message):
    """p_ji h and p_ji w_i of a step."""

    stale_by = "step"
    once_by = ("sender", "life", "step")
    step: int
    weight: float
    parameters: Vector


async def peer(node: Node) -> Vector:
    assert node.data is not None
    saved = node.saved or {"x": node.model.init(), "w": 1.0, "step": 0, "state": None}
    x: Vector = saved["x"]
    w: float = saved["w"]
    z, state = model(x, w), saved["state"]
    edges = Edges(node, saved.get("edges"))
    for k in node.rounds(await edges.begin(saved["step"])):
        r: Trained = await node.compute(LocalSGD(z, node.data, k, node.workload, state=state))
        h = r.parameters if z is x else x + (r.parameters - z)  # x_i - eta g_i(z_i)
        x, w = await pushed(node, edges, k, h, w)
        z, state = model(x, w), r.state
        node.record(round=k, train_loss=r.loss)
        node.publish(z, step=k + 1)
        await node.save(x=x, w=w, step=k + 1, state=state, edges=dict(edges.since))
    return z


def model(x: Vector, w: float) -> Vector:
    """z = x / w; x itself where w is 1."""
    return x if w == 1.0 else x * (1.0 / w)


async def pushed(node: Node, edges: Edges, k: int, h: Vector, w: float) -> tuple[Vector, float]:
    """Step k of push-sum: x and w after it, summed in ascending id."""
    here = set(await edges.settled(k))
    receivers, senders = partners(node, k)
    share = 1.0 / (1 + len(receivers))
    reached = [j for j in receivers if j in here]
    transfers = [node.send(j, Push(k, w * share, h * share)) for j in reached]
    sums: dict[int, tuple[Vector, float]] = {}
    async for m in edges.gather(Push, [j for j in senders if j in here], k):
        sums[m.sender] = m.parameters, m.weight
    own = 1.0 - len(reached) * share
    for transfer in transfers:
        try:
            await transfer.delivered
        except Unreachable:
            own += share
    sums[node.id] = h * own, w * own
    (x, w), *others = (sums[j] for j in sorted(sums))
    for more_x, more_w in others:
        x, w = x + more_x, w + more_w
    return x, w


def partners(node: Node, k: int) -> tuple[list[int], list[int]]:
    """Whom this node sends to at step k, and who sends to it."""
    config: SGPConfig = node.config
    i, n = node.id, len(node.fleet.ids())
    if config.edges:
        return [b for a, b in config.edges if a == i], [a for a, b in config.edges if b == i]
    if n == 1:
        return [], []
    if config.graph == "exponential":
        hop = 2 ** (k % (n - 1).bit_length())
        return [(i + hop) % n], [(i - hop) % n]
    drawn = (np.arange(n) + node.shared_rng("receivers", k).integers(1, n, n)) % n
    return [int(drawn[i])], np.flatnonzero(drawn == i).tolist()


def _refuse_impossible(plan: RunPlan) -> None:
    edges, n = plan.config.edges, len(plan.nodes)
    for pair in edges:
        if edges.count(pair) > 1 or pair[0] == pair[1] or not all(0 <= i < n for i in pair):
            raise ConfigError("method.sgp.edges", list(pair), f"two different ids below {n}, each pair once")
    backwards = [(b, a) for a, b in edges]
    if edges and not (_reached(edges) == _reached(backwards) == set(range(n))):
        raise ConfigError("method.sgp.edges", edges, "a way from every node to every other")


def _reached(edges: Iterable[tuple[int, int]]) -> set[int]:
    """The nodes to which edges lead from node 0, itself included."""
    found, fresh = {0}, {0}
    while fresh:
        fresh = {b for a, b in edges if a in fresh} - found
        found |= fresh
    return found


METHOD = Method(
    name="sgp",
    title="Stochastic gradient push",
    paper="Assran, Loizou, Ballas, Rabbat 2019, https://arxiv.org/abs/1811.10792",
    roles={"peer": peer},
    messages=(Push, *MESSAGES),
    config=SGPConfig,
    ends_with=("peer",),
    needs="complete",
    evaluates="each",
    prepare=_refuse_impossible,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(ALL_FINITE,),
)
