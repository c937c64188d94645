"""What a round of split training costs each device at each cut, and what a device cannot hold.

Cut l: blocks 0 .. l - 1 are the device's; l = L, the number of blocks, leaves nothing to the server. Seconds
are those of the work items that the methods give out, on the devices as profiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgefl.devices import DeviceProfile
from edgefl.errors import ConfigError
from edgefl.learning.cost import Cost, duration_s
from edgefl.learning.learner import Learner
from edgefl.learning.model import Model
from edgefl.learning.work_costs import stage_backward_cost, stage_forward_cost
from edgefl.learning.workload import Workload
from edgefl.nodes.plan import RunPlan
from edgefl.parameters.crossing import WHOLE, Packing

BATCH_HEADER_BYTES, TURN_HEADER_BYTES = 500, 420
"""Headers of a batch's two messages and of a turn's two, about as measured: they count where data is few."""


@dataclass(frozen=True)
class SplitCost:
    """One device's round, by cut: entry l - 1 is for cut l.

    device_s: its computing. server_s: the server's for it, on the whole server. link_bytes: what crosses
    its link, both ways together, headers included. latency_s: of all messages. memory_bytes: what its part
    needs at once.
    """

    device_s: tuple[float, ...]
    server_s: tuple[float, ...]
    link_bytes: tuple[float, ...]
    latency_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]

    def fits(self, cut: int, profile: DeviceProfile) -> bool:
        """Whether the device has the memory for this cut."""
        return self.memory_bytes[cut - 1] <= profile.memory_bytes


def split_cost(
    learner: Learner,
    device: DeviceProfile,
    server: DeviceProfile,
    workload: Workload,
    num_examples: int,
    *,
    latency_s: float = 0.0,
    packing: Packing = WHOLE,
    moves_front: bool = True,
    slowdown: float = 1.0,
) -> SplitCost:
    """The costs of one device. All batches count as full ones.

    latency_s: one way. packing: of what crosses. moves_front: the front goes there and back each round.
    slowdown: the device's work takes so many times what its profile says.
    """
    model, batch = learner.model, workload.batch_size
    steps, last = workload.num_steps(num_examples), len(model.blocks)
    cuts = range(1, last + 1)
    return SplitCost(
        device_s=tuple(steps * slowdown * _front_s(model, l, batch, device) for l in cuts),
        server_s=tuple(steps * _rear_s(model, l, batch, server) for l in cuts),
        link_bytes=tuple(
            steps * (crossing_bytes(model, l, batch, packing) + (BATCH_HEADER_BYTES if l < last else 0))
            + (2 * model.stage(0, l).counts.parameter_bytes if moves_front else 0)
            + TURN_HEADER_BYTES
            for l in cuts
        ),
        latency_s=tuple(((2 * steps if l < last else 0) + 2) * latency_s for l in cuts),
        memory_bytes=tuple(front_memory_bytes(learner, l, batch) for l in cuts),
    )


def raw_cost(
    learner: Learner,
    server: DeviceProfile,
    workload: Workload,
    num_examples: int,
    latency_s: float,
    packing: Packing,
) -> tuple[float, float, float]:
    """A round at cut 0: latencies in seconds, bytes over the link, seconds of the whole server."""
    model, batch = learner.model, workload.batch_size
    steps = workload.num_steps(num_examples)
    size = crossing_bytes(model, 0, batch, packing) + BATCH_HEADER_BYTES
    return (
        (2 * steps + 2) * latency_s,
        steps * size + TURN_HEADER_BYTES,
        steps * _rear_s(model, 0, batch, server),
    )


def crossing_bytes(model: Model, cut: int, batch: int, packing: Packing = WHOLE) -> int:
    """Payload bytes of one batch at a cut, smashed data, labels and gradient; 0 where all is local.

    At cut 0 the examples cross, and the gradient at them.
    """
    if cut == len(model.blocks):
        return 0
    values = batch * math.prod(model.block_counts[cut - 1].output_shape if cut else model.input_shape)
    return 2 * packing.size_bytes(values) + label_bytes(model, batch)


def label_bytes(model: Model, batch: int) -> int:
    """Bytes of a batch's labels as they travel: 4 for each label, token or target."""
    length = math.prod((model.whole or model).input_shape)
    targets = {"classification": 1, "language": length, "regression": model.num_outputs}
    return 4 * batch * targets[model.task]


def front_memory_bytes(learner: Learner, cut: int, batch: int, head_blocks: int = 0) -> int:
    """Bytes that a client needs at once: its parts' parameters, gradients, optimiser state, kept values."""
    model, last = learner.model, len(learner.model.blocks)
    stages = ([model.stage(0, cut)] if cut else []) + (
        [model.stage(last - head_blocks, last)] if head_blocks else []
    )
    states = learner.optimizer.state_sizes.count(None)
    return sum(
        stage_backward_cost(stage, batch, False, kept=True).memory_bytes
        + states * stage.counts.parameter_bytes
        for stage in stages
    )


def _front_s(model: Model, cut: int, batch: int, device: DeviceProfile) -> float:
    """Seconds of one batch at the device."""
    stage = model.stage(0, cut)
    if cut == len(model.blocks):
        return duration_s(stage_backward_cost(stage, batch, False, kept=False), device)
    passes: tuple[Cost, ...] = (
        stage_forward_cost(stage, batch),
        stage_backward_cost(stage, batch, False, kept=True),
    )
    return sum(duration_s(cost, device) for cost in passes)


def _rear_s(model: Model, cut: int, batch: int, server: DeviceProfile) -> float:
    """Seconds of one batch at the server."""
    last = len(model.blocks)
    if cut == last:
        return 0.0
    return duration_s(stage_backward_cost(model.stage(cut, last), batch, True, kept=False), server)


# --- what is refused before anything starts ---------------------------------------------------------------


def refuse_clipping(plan: RunPlan) -> None:
    """Raises ConfigError for a clipping norm: no part knows the norm of the whole gradient."""
    assert plan.learner is not None
    norm = plan.learner.train.clip_norm
    if norm is not None:
        raise ConfigError(
            "train.clip_norm", norm, f"none for {plan.method.name}: no node has the whole gradient"
        )


def refuse_too_large(plan: RunPlan, k: int, cut: int, *, key: str, head_blocks: int = 0) -> None:
    """Raises ConfigError when client k has not the memory for its part of the model."""
    assert plan.learner is not None
    spec = plan.nodes[k]
    needed = front_memory_bytes(plan.learner, cut, spec.workload.batch_size, head_blocks)
    if needed > spec.profile.memory_bytes:
        accepted = f"{plan.name(k)} needs {needed} bytes for its part and has {spec.profile.memory_bytes}"
        raise ConfigError(f"method.{plan.method.name}.{key}", cut, accepted)


def refuse_impossible_cut(plan: RunPlan) -> None:
    """Raises ConfigError for one cut that the model does not have or a client cannot hold, or clipping."""
    assert plan.learner is not None
    cut, blocks = plan.config.cut, len(plan.learner.model.blocks)
    if cut >= blocks:
        raise ConfigError(f"method.{plan.method.name}.cut", cut, f"1 to {blocks - 1} for this model")
    refuse_clipping(plan)
    for k in plan.ids("client"):
        refuse_too_large(plan, k, cut, key="cut")
