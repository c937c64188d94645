"""The Swift variant that DivShare is compared with (Biswas et al. 2025, https://arxiv.org/abs/2410.12918).

In the form of the authors' artifact: DivShare (divshare.py) with K = 1, whole models, whose out-queue is
never emptied: on an uplink that moves fewer than J models per iteration stale models pile up. It is not
SWIFT, which is swift.py: peers are drawn anew each time, and equal weights average what happened to arrive.
"""

from __future__ import annotations

from pydantic import Field

from edgefl.methods.decentralized.divshare import Fragment, index_sets, refuse_recipients, share
from edgefl.nodes import Faults, Method, MethodConfig, Node
from edgefl.parameters import Vector
from edgefl.patterns.reports import ALL_FINITE


class DivShareSwiftConfig(MethodConfig):
    """J; H, the batch and the rate are [train]'s."""

    recipients: int = Field(default=6, ge=1)
    """J: peers that each model is sent to, below the number of peers."""


async def peer(node: Node) -> Vector:
    whole = index_sets(node.model.layout, 1, node.shared_rng("divshare fragments"))
    return await share(node, whole, drop_unsent=False)


METHOD = Method(
    name="divshare-swift",
    title="DivShare's Swift variant: whole models, nothing dropped",
    paper="Biswas et al. 2025, https://arxiv.org/abs/2410.12918",
    roles={"peer": peer},
    messages=(Fragment,),
    config=DivShareSwiftConfig,
    ends_with=("peer",),
    needs="complete",
    evaluates="each",
    prepare=refuse_recipients,
    tolerates=Faults(crashes=True, returns=True, partitions=True, silence=True),
    invariants=(ALL_FINITE,),
)
