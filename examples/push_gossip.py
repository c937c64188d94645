"""Push gossip: train, tell one neighbor, average with what has been told.

After gossip learning (Hegedus, Danner, Jelasity 2019, https://doi.org/10.1007/978-3-030-22496-7_5). x: this
peer's model. Each round is [train]'s local steps. Differs from the paper: all models that have come are
averaged with equal weights, and not one after the other by age.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Faults, Message, Method, Node
from edgefl.parameters import Vector, WeightedMean


@dataclass(frozen=True)
class Model(Message):
    newest_by = ("sender",)
    parameters: Vector


async def peer(node: Node) -> Vector:
    saved = node.saved or {"x": node.model.init(), "round": 0}
    x: Vector = saved["x"]
    for k in node.rounds(saved["round"]):
        r: Trained = await node.compute(LocalSGD(x, node.data, k, node.workload))
        mean = WeightedMean(x.layout)
        mean.add(r.parameters)
        for m in node.take(Model):
            mean.add(m.parameters)
        x = mean.value(otherwise=x)
        await node.send(int(node.rng("neighbor", k).choice(node.fleet.neighbors)), Model(x))
        node.record(train_loss=r.loss)
        node.publish(x, step=k + 1)
        await node.save(x=x, round=k + 1)
    return x


METHOD = Method(
    name="push-gossip",
    title="Push gossip",
    paper="Hegedus, Danner, Jelasity 2019, https://doi.org/10.1007/978-3-030-22496-7_5",
    roles={"peer": peer},
    messages=(Model,),
    ends_with=("peer",),
    needs="connected",
    evaluates="each",
    tolerates=Faults(crashes=True, returns=True, partitions=True),
)
