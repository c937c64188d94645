"""What work costs, and how long it takes on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgefl.devices import DeviceProfile
from edgefl.learning.operators import Calls


@dataclass(frozen=True)
class Cost:
    """flops: float32 operations; traffic_bytes: to and from memory; num_steps: of the fixed overhead each;
    memory_bytes: needed at once. seconds: where given, the time on any device, whatever the rest says.
    model, batch_size: name a step time that the profile may have measured. calls: what a profile with
    measured kernels goes by. parts: done one after the other; where there are some, the time is theirs."""

    flops: float = 0.0
    traffic_bytes: float = 0.0
    num_steps: float = 0.0
    memory_bytes: int = 0
    seconds: float | None = None
    model: str | None = None
    batch_size: int | None = None
    calls: Calls | None = None
    parts: tuple[Cost, ...] = ()


def in_turn(parts: Sequence[Cost], memory_bytes: int) -> Cost:
    """What parts cost that are done one after the other. memory_bytes: needed at once for all of them."""
    return Cost(
        flops=sum(part.flops for part in parts),
        traffic_bytes=sum(part.traffic_bytes for part in parts),
        num_steps=sum(part.num_steps for part in parts),
        memory_bytes=memory_bytes,
        parts=tuple(parts),
    )


def duration_s(cost: Cost, profile: DeviceProfile) -> float:
    """Seconds that work takes on a device that does nothing else.

    The best that the profile knows: the step time that it measured for this model and batch size; the sum
    over the operators whose times it measured; or a roofline, the slower of arithmetic and memory traffic,
    plus the per-step overhead.
    """
    if cost.seconds is not None:
        return cost.seconds
    if cost.parts:
        return sum(duration_s(part, profile) for part in cost.parts)
    measured = profile.step_times_s.get(cost.model or "", {}).get(cost.batch_size or 0)
    if measured is not None:
        return cost.num_steps * measured
    if profile.kernels is not None and cost.calls is not None:
        return cost.calls.seconds(profile.kernels)
    arithmetic = cost.flops / profile.compute_flops
    memory = cost.traffic_bytes / profile.memory_bytes_per_s
    return max(arithmetic, memory) + cost.num_steps * profile.step_overhead_s
