"""CHOCO-SGD (Koloskova, Stich, Jaggi 2019, Algorithm 2, https://arxiv.org/abs/1902.00340).

x_i: node i's model; xh_i: its public copy, which it and its neighbors hold, 0 at first; Q: [compress].
Step: h = x_i - eta g_i(x_i); q_i = Q(h - xh_i), sent to the neighbors; xh_j <- xh_j + q_j for the
neighbors' and the own copy; x_i <- h + gamma sum_j W_ij (xh_j - xh_i). W symmetric and doubly stochastic
([network] mixing).
Choices: gamma is 1 without compression and 0.2 with it where not given; a quantiser's q is scaled by 1 / (1
+ omega), its variance bound, which makes it contractive; Q has no memory of its own, since h - xh is one.
Each neighbor's copy is kept, not only their weighted sum, so that one that is gone can be dropped: its
weight falls to the node itself. The copies must be equal at all ends: who returns would have missed some,
and is not taken back. local_steps of [train] above 1 make that many steps in place of one gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Faults, Message, Method, MethodConfig, Node
from edgefl.parameters import Vector, mix
from edgefl.patterns.compression import Sent, contracted, opened, packed_difference
from edgefl.patterns.gather import gather
from edgefl.patterns.reports import ALL_FINITE


class ChocoConfig(MethodConfig):
    """gamma; Q is [compress], W is [network]'s, eta and B are [train]'s."""

    gamma: float | None = Field(default=None, gt=0, le=1)
    """Consensus step size; 1 without compression and 0.2 with it where not given."""


@dataclass(frozen=True)
class Difference(Message):
    """q of a step."""

    stale_by = "step"
    once_by = ("sender", "step")
    step: int
    values: Sent


async def peer(node: Node) -> Vector:
    assert node.data is not None
    gamma = node.config.gamma or (0.2 if node.compress.on else 1.0)
    zero = node.model.init() * 0.0
    nothing_known = dict.fromkeys(node.fleet.neighbors, zero)
    saved = node.saved or {
        "x": node.model.init(),
        "own": zero,
        "copies": nothing_known,
        "step": 0,
        "state": None,
    }
    x: Vector = saved["x"]
    xh_i: Vector = saved["own"]
    copies: dict[int, Vector] = dict(saved["copies"])
    state = saved["state"]
    if node.life:  # the others have gone on without it
        return x
    for k in node.rounds(saved["step"]):
        r: Trained = await node.compute(LocalSGD(x, node.data, k, node.workload, state=state))
        h, state = r.parameters, r.state
        q = packed_difference(node, h - xh_i, k)
        xh_i = xh_i + contracted(node.compress, opened(node, q, x.layout))
        node.send(tuple(copies), Difference(k, q))
        heard: set[int] = set()
        async for m in gather(node, Difference, tuple(copies), step=k):
            copies[m.sender] += contracted(node.compress, opened(node, m.values, x.layout))
            heard.add(m.sender)
        copies = {j: copy for j, copy in copies.items() if j in heard}
        x = h + (_mixed(node, copies, xh_i) - xh_i) * gamma
        node.record(round=k, train_loss=r.loss)
        node.publish(x, step=k + 1)
        await node.save(x=x, own=xh_i, copies=dict(copies), step=k + 1, state=state)
    return x


def _mixed(node: Node, copies: dict[int, Vector], xh_i: Vector) -> Vector:
    """sum_j W_ij xh_j over those that live."""
    row = {j: share for j, share in node.fleet.W.items() if j in copies or j == node.id}
    row[node.id] += 1 - sum(row.values())  # shares of the missing
    return mix({**{j: copies[j] for j in row if j != node.id}, node.id: xh_i}, row)


METHOD = Method(
    name="choco-sgd",
    title="Decentralized SGD with compressed differences",
    paper="Koloskova, Stich, Jaggi 2019, https://arxiv.org/abs/1902.00340",
    roles={"peer": peer},
    messages=(Difference,),
    config=ChocoConfig,
    ends_with=("peer",),
    needs="connected",
    evaluates="each",
    compresses=True,
    tolerates=Faults(crashes=True, partitions=True),
    invariants=(ALL_FINITE,),
)
