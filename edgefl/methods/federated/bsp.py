"""BSP, bulk synchronous parallel (Valiant 1990; as the parameter server of Ho et al. 2013 has it).

SSP with s = 0 and reads of complete clocks: a client begins clock c when all have completed c clocks, and
reads exactly their changes, summed in order of id. With one local step and changes scaled by 1/N it is
synchronous SGD, however unequal the clients' speeds. Choices as in ssp.
"""

from __future__ import annotations

from edgefl.methods.federated.ssp import ClockConfig, Push, View, client, serve
from edgefl.nodes import Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.reports import FINITE, answers


async def server(node: Node) -> Vector:
    return await serve(node, s=0, reads="complete")


METHOD = Method(
    name="bsp",
    title="Bulk synchronous parallel parameter server",
    paper="Ho et al. 2013, https://papers.nips.cc/paper/4894",
    roles={"server": server, "client": client},
    messages=(View, Push),
    config=ClockConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(View, Push)),
    stateless=("client",),
)
