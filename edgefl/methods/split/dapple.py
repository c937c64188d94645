"""DAPPLE (Fan et al. 2021, https://arxiv.org/abs/2007.01045): pipelined data-parallel training.

The model is cut into S stages, each replicated on some devices; a global batch is cut into M micro-batches.
Stage i (from 0) runs K_i forwards first, then a backward and a forward in turn, then the backwards left:
K_i = min(S - i, D) (policy PA) or min(2 (S - i) - 1, D) (PB), D what fits into memory. Gradients add up
over the micro-batches, weighted by B_i / B; the replicas of a stage sum theirs around a ring when its last
backward has ended; one optimiser step; the next batch only then. Parameters do not change within a batch,
so that training equals plain SGD on the global batches.

The planner (planning.dapple) chooses cuts, replicas, devices and policy by what a step takes. A global batch
is [train]'s batch_size; a round is its local steps.
Choices: all devices read the pooled examples from a shared storage, as on a cluster: inputs and labels do not
travel. Each replica takes consecutive rows of every micro-batch, in proportion to its device's speed. Models
with batch statistics are refused: these would be per micro-batch. The paper handles no failure; here a lost
device stops the step, and those who are left go on from the last consistent one (see pipeline_lead).
"""

from __future__ import annotations

from edgefl.methods.split.pipeline import pipeline_peer
from edgefl.methods.split.pipeline_messages import INVARIANTS, MESSAGES
from edgefl.nodes import Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.planning.fleet import PipelineConfig, policies_of, refuse_no_pipeline
from edgefl.planning.memory import needs_of_stages


async def peer(node: Node) -> Vector | None:
    return await pipeline_peer(node, policies_of("dapple"))


METHOD = Method(
    name="dapple",
    title="Pipelined data parallelism with early backward passes",
    paper="Fan et al. 2021, https://arxiv.org/abs/2007.01045",
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
