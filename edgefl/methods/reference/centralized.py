"""Centralized training: one node holds all data. The reference that distribution is measured against.

Each round makes [train]'s local steps or epochs on the union of all shares.
"""

from __future__ import annotations

from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Method, Node
from edgefl.parameters import Vector


async def server(node: Node) -> Vector:
    assert node.data is not None
    saved = node.saved or {"x": node.model.init(), "round": 0, "state": None}
    x: Vector = saved["x"]
    state = saved["state"]
    for t in node.rounds(saved["round"]):
        r: Trained = await node.compute(LocalSGD(x, node.data, t, node.workload, state=state))
        x, state = r.parameters, r.state
        node.record(round=t, train_loss=r.loss)
        node.publish(x, step=t + 1)
        await node.save(x=x, round=t + 1, state=state)
    return x


METHOD = Method(
    name="centralized",
    title="Training on all data in one place",
    paper="Robbins and Monro 1951, https://doi.org/10.1214/aoms/1177729586",
    roles={"server": server},
    messages=(),
    ends_with=("server",),
    needs="any",
    evaluates="server",
    pools_data=True,
)
