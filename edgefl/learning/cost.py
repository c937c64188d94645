"""What work costs, and how long it takes on a device."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.devices import DeviceProfile


@dataclass(frozen=True)
class Cost:
    """flops: float32 operations; traffic_bytes: to and from memory; num_steps: of the fixed overhead each;
    memory_bytes: needed at once. seconds: where given, the time on any device, whatever the rest says.
    model, batch_size: name a step time that the profile may have measured."""

    flops: float = 0.0
    traffic_bytes: float = 0.0
    num_steps: float = 0.0
    memory_bytes: int = 0
    seconds: float | None = None
    model: str | None = None
    batch_size: int | None = None


def duration_s(cost: Cost, profile: DeviceProfile) -> float:
    """Seconds that work takes on a device that does nothing else.

    A roofline, the slower of arithmetic and memory traffic, plus the per-step overhead; or the step
    time that the profile measured for this model and batch size.
    """
    if cost.seconds is not None:
        return cost.seconds
    measured = profile.step_times_s.get(cost.model or "", {}).get(cost.batch_size or 0)
    if measured is not None:
        return cost.num_steps * measured
    arithmetic = cost.flops / profile.compute_flops
    memory = cost.traffic_bytes / profile.memory_bytes_per_s
    return max(arithmetic, memory) + cost.num_steps * profile.step_overhead_s
