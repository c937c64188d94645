"""Ring all-reduce SGD: synchronous data-parallel SGD whose gradients are averaged around a ring.

Step k: every peer takes one mini-batch gradient at the common x, all average their gradients by chunked
reduce-scatter and all-gather (2(n-1) steps; Patarasuk and Yuan 2009), and every one applies the mean. The
ring is the peers in ascending id. Choices: all batches weigh the same. When a peer is gone, the others agree
on who has which mean, and begin the unfinished one anew without it; one that returns is not taken back.
"""

from __future__ import annotations

from edgefl.learning.work import Gradient, GradientResult
from edgefl.nodes import Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.reports import ALL_EQUAL, ALL_FINITE
from edgefl.patterns.surviving import MESSAGES, SurvivingRing


async def peer(node: Node) -> Vector:
    assert node.data is not None
    x = node.model.init()
    state = node.optimizer.init(x.layout)
    ring, made = SurvivingRing(node, node.fleet.ids("peer")), 0
    for k in node.rounds():
        r: GradientResult = await node.compute(Gradient(x, node.data, k, node.workload))
        mean = await ring.mean(r.gradient, k)
        x, state = node.optimizer.step(x, mean, state, k)
        node.record(round=k, train_loss=r.loss)
        made = k + 1
        node.publish(x, step=made)
    await ring.end(made)
    return x


METHOD = Method(
    name="ring-allreduce",
    title="Synchronous SGD with ring all-reduce",
    paper="Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002",
    roles={"peer": peer},
    messages=MESSAGES,
    ends_with=("peer",),
    needs="any",
    evaluates="mean",
    tolerates=Faults(crashes=True, partitions=True),
    invariants=(ALL_FINITE, ALL_EQUAL),
)
