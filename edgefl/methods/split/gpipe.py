"""GPipe (Huang et al. 2019, https://arxiv.org/abs/1811.06965): pipelined training, all forwards first.

The model is cut into S stages, a batch into M micro-batches. All micro-batches go forward in order through
the stages, then backward from the last one on; gradients add up, weighted by B_i / B, and one step follows.
Every stage holds M micro-batches at once; where memory holds fewer, the batch goes in rounds of what fits,
with a drain each and still one step.

With `recompute` a stage keeps of each open micro-batch its input alone, as the paper does, and makes the
forward pass again; without it, the choice here, what a forward pass keeps is kept. Choices: stages are
planned, may have replicas, and those who are left go on after a loss as in `dapple`.
"""

from __future__ import annotations

from edgefl.methods.split.pipeline import pipeline_peer
from edgefl.methods.split.pipeline_messages import INVARIANTS, MESSAGES
from edgefl.nodes import Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.planning.fleet import PipelineConfig, policies_of, refuse_no_pipeline
from edgefl.planning.memory import needs_of_stages


async def peer(node: Node) -> Vector | None:
    return await pipeline_peer(node, policies_of("gpipe"))


METHOD = Method(
    name="gpipe",
    title="Pipelined training, all forwards first",
    paper="Huang et al. 2019, https://arxiv.org/abs/1811.06965",
    roles={"peer": peer},
    messages=MESSAGES,
    config=PipelineConfig,
    ends_with=("peer",),
    needs="complete",
    evaluates="parts",
    prepare=refuse_no_pipeline,
    memory=needs_of_stages,
    tolerates=Faults(crashes=False, returns=True, partitions=True),
    invariants=INVARIANTS,
)
