"""Fixed AdaComm: local SGD with a fixed communication period (as ADSP compares with it: Hu, Wang, Wu 2020,
https://arxiv.org/abs/1911.06949).

All clients make tau steps, the server waits for all of them, and w is the plain mean. AdaComm whose tau stays
as it is.
"""

from __future__ import annotations

from edgefl.methods.federated.adacomm import Fixed, FixedConfig, GlobalModel, LocalModel, client, serve
from edgefl.nodes import Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import Stop, refuse_void_rounds


async def server(node: Node) -> Vector:
    return await serve(node, Fixed)


METHOD = Method(
    name="fixed-adacomm",
    title="Local SGD with a fixed communication period",
    paper="Hu, Wang, Wu 2020, https://arxiv.org/abs/1911.06949",
    roles={"server": server, "client": client},
    messages=(GlobalModel, LocalModel, Stop),
    config=FixedConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=refuse_void_rounds,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, LocalModel)),
    stateless=("client",),
)
