"""The AD-PSGD variant that DivShare is compared with (Biswas et al. 2025, https://arxiv.org/abs/2410.12918).

In the form of the authors' artifact. Each iteration: H local steps (one Work item, [train]); the result is
the latest model, and floor(J/2) pushes of it, flagged `first`, go to the end of the out-queue, each to a
peer drawn by itself (repeats possible); average x with the newest model of each peer that one has come from.
Whoever receives a first message puts its own latest model of that moment (the initial one before its first
phase) to the end of its out-queue as an answer. The queue is never emptied: an uplink that moves fewer than
about J models per iteration falls behind for ever. It is not AD-PSGD, which is ad_psgd.py: no pair averages.

Choices. Each queued message owns its flag (the artifact shares a dictionary, and so may flip the flags of
messages that still wait: a slip). Sums in ascending id; buffers never travel. One that returns goes on from
its last iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field
from torch import Tensor

from edgefl.learning.work import LocalSGD, Trained
from edgefl.methods.decentralized.divshare import refuse_recipients
from edgefl.nodes import Faults, Message, Method, MethodConfig, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.patterns.out_queue import OutQueue
from edgefl.patterns.reports import ALL_FINITE


class DivShareADPSGDConfig(MethodConfig):
    """J; H, the batch and the rate are [train]'s."""

    recipients: int = Field(default=6, ge=2)
    """J: models that a node sends per iteration, pushes and expected answers together; below the number of
    peers, or 2."""


@dataclass(frozen=True)
class Push(Message):
    """A whole model. first: it asks for the receiver's in return."""

    first: bool
    values: Tensor


@dataclass
class Shared:
    """What a peer's two tasks share: its latest model, and the newest that has come from each peer."""

    latest: Vector
    arrived: dict[int, Tensor] = field(default_factory=dict)


async def peer(node: Node) -> Vector:
    assert node.data is not None
    start = node.model.init()
    saved = node.saved or {"x": start, "latest": start, "it": 0, "state": None}
    x: Vector = saved["x"]
    state = saved["state"]
    others = [j for j in node.fleet.ids() if j != node.id]
    shared, out = Shared(saved["latest"]), OutQueue(node)
    node.start(_answer(node, shared, out))
    for it in node.rounds(saved["it"]):
        r: Trained = await node.compute(LocalSGD(x, node.data, it, node.workload, state=state))
        x, state = r.parameters, r.state
        shared.latest = x
        if others:
            drawn = node.rng("pushes", it).choice(others, node.config.recipients // 2)
            out.extend((int(p), Push(True, x.values)) for p in drawn)
        x = average(x, shared.arrived)
        shared.arrived.clear()
        node.record(round=it, train_loss=r.loss, queued=len(out))
        node.publish(x, step=it + 1)
        await node.save(x=x, latest=shared.latest, it=it + 1, state=state)
    return x


async def _answer(node: Node, shared: Shared, out: OutQueue) -> None:
    while True:
        m = await node.receive(Push)
        shared.arrived[m.sender] = m.values
        if m.first:
            out.extend([(m.sender, Push(False, shared.latest.values))])


def average(x: Vector, arrived: dict[int, Tensor]) -> Vector:
    """The mean of x and what has arrived."""
    if not arrived:
        return x
    total = x.values.clone()
    for j in sorted(arrived):
        total += arrived[j]
    return x.with_values(total / (1 + len(arrived)))


def _refuse_impossible(plan: RunPlan) -> None:
    refuse_recipients(plan, least=2)  # a push and its answer, also where there is one peer


METHOD = Method(
    name="divshare-adpsgd",
    title="DivShare's AD-PSGD variant: pushes and answers of whole models",
    paper="Biswas et al. 2025, https://arxiv.org/abs/2410.12918",
    roles={"peer": peer},
    messages=(Push,),
    config=DivShareADPSGDConfig,
    ends_with=("peer",),
    needs="complete",
    evaluates="each",
    prepare=_refuse_impossible,
    tolerates=Faults(crashes=True, returns=True, partitions=True, silence=True),
    invariants=(ALL_FINITE,),
)
