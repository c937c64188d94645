"""Small runs for tests: a plan of toy nodes without a model, on the virtual runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgefl.devices import DeviceProfile
from edgefl.learning.workload import Workload
from edgefl.network import Access, NetworkPlan, Topology
from edgefl.nodes import Message, Method
from edgefl.nodes.plan import FaultPlan, NodeSpec, RunPlan
from edgefl.runtimes.outcome import Outcome
from edgefl.runtimes.virtual import VirtualRuntime

PROFILE = DeviceProfile(name="toy", compute_flops=1e9, memory_bytes_per_s=1e15, memory_bytes=1 << 30)
FAST = Access(up_bytes_per_s=1e9, down_bytes_per_s=1e9)


class Watcher:
    """An observer that keeps everything."""

    every_s: float | None = None

    def __init__(self, every_s: float | None = None) -> None:
        self.every_s = every_s
        self.spans: list[tuple[int, str, float, float, str]] = []
        self.events: list[tuple[float, str, int, str]] = []
        self.metrics: list[tuple[int, float, dict[str, float]]] = []
        self.models: list[tuple[int, float, int, Any]] = []
        self.ticks: list[float] = []

    def begin(self, traffic: Any) -> None:
        self.traffic = traffic

    def published(self, node: int, time_s: float, step: int, parameters: Any, part: str | None) -> bool:
        self.models.append((node, time_s, step, parameters))
        return False

    def tick(self, time_s: float) -> bool:
        self.ticks.append(time_s)
        return False

    def recorded(self, node: int, time_s: float, metrics: Mapping[str, float]) -> None:
        self.metrics.append((node, time_s, dict(metrics)))

    def span(self, node: int, kind: str, start_s: float, end_s: float, detail: str) -> None:
        self.spans.append((node, kind, start_s, end_s, detail))

    def event(self, time_s: float, kind: str, node: int, detail: str) -> None:
        self.events.append((time_s, kind, node, detail))


def toy_plan(
    programs: Sequence[Callable[..., Any]],
    messages: Sequence[type[Message]],
    *,
    seed: int = 0,
    config: Any = None,
    access: Access | Sequence[Access] = FAST,
    link_model: str = "fifo",
    ends_with: Sequence[int] | None = None,
    faults: FaultPlan | None = None,
    time_s: float | None = None,
    profiles: Sequence[DeviceProfile] | None = None,
    may_fail: Sequence[int] = (),
    stateless: Sequence[int] = (),
    rounds: int | None = None,
) -> RunPlan:
    """One node per program, each with a role of its own ("role 0", ...), all connected."""
    n = len(programs)
    names = [f"role {i}" for i in range(n)]
    method = Method(
        name="toy",
        title="",
        paper="",
        roles=dict(zip(names, programs, strict=True)),
        messages=tuple(messages),
        ends_with=tuple(names[i] for i in (range(n) if ends_with is None else ends_with)),
        needs="any",
        evaluates="each",
        may_fail=tuple(names[i] for i in may_fail),
        stateless=tuple(names[i] for i in stateless),
    )
    links = (access,) * n if isinstance(access, Access) else tuple(access)
    everyone = tuple(tuple(j for j in range(n) if j != i) for i in range(n))
    return RunPlan(
        seed=seed,
        method=method,
        config=config,
        nodes=tuple(
            NodeSpec(name, profiles[i] if profiles else PROFILE, Workload()) for i, name in enumerate(names)
        ),
        network=NetworkPlan(Topology("complete", everyone), links, link_model),  # type: ignore[arg-type]
        learner=None,
        rounds=rounds,
        time_s=time_s,
        faults=faults or FaultPlan(),
    )


def run_toy(
    programs: Sequence[Callable[..., Any]],
    messages: Sequence[type[Message]] = (),
    *,
    watcher: Watcher | None = None,
    **plan: Any,
) -> Outcome:
    """Run toy programs in virtual time."""
    return VirtualRuntime(toy_plan(programs, messages, **plan), watcher or Watcher(), None).run()


def access(up: float, down: float | None = None, latency_s: float = 0.0, **more: Any) -> Access:
    """A link with `up` bytes per second, and as many down where not said otherwise."""
    return Access(
        up_bytes_per_s=up, down_bytes_per_s=down if down is not None else up, latency_s=latency_s, **more
    )


__all__ = ["FAST", "PROFILE", "Watcher", "access", "math", "run_toy", "toy_plan"]
