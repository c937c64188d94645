"""D-PSGD (Lian et al. 2017, Algorithm 1, https://arxiv.org/abs/1705.09056).

Step k of node i: x_i <- sum_j W_ij x_j - eta g_i(x_i), the gradient at the model before mixing, so that
exchange and computing overlap. W symmetric and doubly stochastic ([network] mixing, Metropolis by default).
`order = "adapt_then_combine"`: x_i <- sum_j W_ij (x_j - eta g_j(x_j)): updated models are mixed, no overlap.
Choices: local_steps of [train] above 1 make that many SGD steps in place of one gradient, and local_epochs
likewise: the paper's is local_steps = 1. A neighbor that is gone leaves its share to the node itself, at
both ends, so that W stays doubly stochastic. One that returns goes on with its saved model at a step that it
agrees on with its neighbors; the steps between are not made up for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Faults, Message, Method, MethodConfig, Node
from edgefl.parameters import Vector, mix
from edgefl.patterns.edges import MESSAGES, Edges
from edgefl.patterns.reports import ALL_FINITE


class DPSGDConfig(MethodConfig):
    """The order of mixing and descending; W is [network]'s, eta and B are [train]'s."""

    order: Literal["combine_then_adapt", "adapt_then_combine"] = "combine_then_adapt"


@dataclass(frozen=True)
class Model(Message):
    stale_by = "step"
    once_by = ("sender", "life", "step")
    step: int
    parameters: Vector


async def peer(node: Node) -> Vector:
    assert node.data is not None
    saved = node.saved or {"x": node.model.init(), "step": 0, "state": None}
    x: Vector = saved["x"]
    state = saved["state"]
    adapt_first = node.config.order == "adapt_then_combine"
    edges = Edges(node, saved.get("edges"))
    for k in node.rounds(await edges.begin(saved["step"])):
        work = LocalSGD(x, node.data, k, node.workload, state=state)
        if adapt_first:
            r: Trained = await node.compute(work)
            x = await _mixed(node, edges, k, r.parameters)
        else:
            local = node.start(node.compute(work))
            mixed = await _mixed(node, edges, k, x)
            r = await local
            x = r.parameters if mixed is x else mixed + (r.parameters - x)  # sum_j W_ij x_j - eta g_i(x_i)
        state = r.state
        node.record(round=k, train_loss=r.loss)
        node.publish(x, step=k + 1)
        await node.save(x=x, step=k + 1, state=state, edges=dict(edges.since))
    return x


async def _mixed(node: Node, edges: Edges, k: int, x: Vector) -> Vector:
    """sum_j W_ij x_j over the neighbors that take part; x itself when there are none."""
    neighbors = await edges.settled(k)
    node.send(neighbors, Model(k, x))
    models = {node.id: x}
    async for m in edges.gather(Model, neighbors, k):
        models[m.sender] = m.parameters
    if len(models) == 1:
        return x
    row = node.fleet.W
    for j in row.keys() - models.keys():
        row[node.id] += row.pop(j)
    return mix(models, row)


METHOD = Method(
    name="d-psgd",
    title="Decentralized parallel SGD",
    paper="Lian et al. 2017, https://arxiv.org/abs/1705.09056",
    roles={"peer": peer},
    messages=(Model, *MESSAGES),
    config=DPSGDConfig,
    ends_with=("peer",),
    needs="connected",
    evaluates="each",
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(ALL_FINITE,),
)
