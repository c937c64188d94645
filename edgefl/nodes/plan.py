"""What a runtime is given to run: one method on one fleet."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from edgefl.devices import DeviceProfile
from edgefl.network import NetworkPlan, Trace
from edgefl.nodes.method import Method
from edgefl.nodes.traffic import Traffic
from edgefl.parameters.compress import CompressConfig

if TYPE_CHECKING:
    from edgefl.data import LocalData
    from edgefl.learning.learner import Learner
    from edgefl.learning.poison import Poison
    from edgefl.learning.workload import Workload
    from edgefl.parameters import Vector


@dataclass(frozen=True)
class NodeSpec:
    """One node of the plan. slowdown: its work takes so many times longer (a straggler); poison: it is
    hostile, and this is what it makes of its results. speed: the share of its processor that other programs
    leave it, over time; thermal: how it throttles; battery_j: what its battery holds at the start."""

    role: str
    profile: DeviceProfile
    workload: Workload
    data: LocalData | None = None
    slowdown: float = 1.0
    poison: Poison | None = None
    speed: Trace | None = None
    thermal: Thermal | None = None
    battery_j: float | None = None


@dataclass(frozen=True)
class Thermal:
    """A processor that works for after_s seconds on end grows hot, and its work then takes `slowdown` times
    longer; recover_s seconds of rest cool it from there to where it began, half of it ends the throttling."""

    after_s: float
    recover_s: float
    slowdown: float


@dataclass(frozen=True)
class Crash:
    """A node dies at `at_s` and returns after `down_s` seconds, or never. silent: nobody is told."""

    node: int
    at_s: float
    down_s: float | None = None
    silent: bool = False


@dataclass(frozen=True)
class Partition:
    """From `at_s` for `for_s` seconds nothing passes between `nodes` and the rest; then it heals."""

    nodes: frozenset[int]
    at_s: float
    for_s: float


@dataclass(frozen=True)
class FaultPlan:
    """What goes wrong in a run, and when. detect_s: from a crash until the others hear of it."""

    crashes: tuple[Crash, ...] = ()
    partitions: tuple[Partition, ...] = ()
    detect_s: float = 1.0
    compute_jitter: float = 0.0
    """Standard deviation of a log-normal factor (mean 1) on each work item's time."""


Replan = Callable[[int, "Workload", float], "Workload | None"]
"""From a node, the workload of its local training and the seconds that this took, another workload; None
where it keeps to the plan."""


@dataclass(frozen=True)
class RunPlan:
    """All that a runtime needs. nodes: by id. rounds, time_s: where the run ends, None: nowhere."""

    seed: int
    method: Method
    config: Any
    nodes: tuple[NodeSpec, ...]
    network: NetworkPlan
    learner: Learner | None
    rounds: int | None = None
    time_s: float | None = None
    mixing: Any = None
    """The MixingMatrix, or None where the method mixes by none."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    groups: tuple[tuple[int, ...], ...] = ()
    """Nodes that hold data, in the groups of [assign], the fastest first."""
    compress: CompressConfig = field(default_factory=CompressConfig)
    """How updates are made smaller on their way, by methods that send updates."""
    replan: Replan | None = None
    """What a node goes by when its local training takes another time than planned; None: the plan stands."""
    found: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What planners have found for it (see FleetView.once)."""

    @cached_property
    def _ids(self) -> Mapping[str | None, tuple[int, ...]]:
        table: dict[str | None, list[int]] = {None: list(range(len(self.nodes)))}
        for i, node in enumerate(self.nodes):
            table.setdefault(node.role, []).append(i)
        return {role: tuple(ids) for role, ids in table.items()}

    def ids(self, role: str | None = None) -> tuple[int, ...]:
        """All node ids, or those of a role, ascending."""
        return self._ids.get(role, ())

    def mixing_row(self, node: int) -> dict[int, float]:
        """W[i, j] by j for i = node. Raises ValueError where the run has no mixing matrix."""
        if self.mixing is None:
            raise ValueError("this run has no mixing matrix")
        return dict(self.mixing.row(node))

    def name(self, node: int) -> str:
        """How a node is called in messages to people: "client 3 (raspberry-pi-4b)"."""
        spec = self.nodes[node]
        return f"{spec.role} {node} ({spec.profile.name})"


class Observer(Protocol):
    """Who watches a run: reads what programs publish, and keeps its records. Never charged."""

    every_s: float | None
    """Seconds between ticks; None: no ticks."""

    def begin(self, traffic: Traffic) -> None:
        """A run begins; `traffic` goes on counting what it sends."""
        ...

    def published(self, node: int, time_s: float, step: int, parameters: Vector, part: str | None) -> bool:
        """A program published. Returns True to stop the run."""
        ...

    def tick(self, time_s: float) -> bool:
        """`every_s` has passed. Returns True to stop the run."""
        ...

    def recorded(self, node: int, time_s: float, metrics: Mapping[str, float]) -> None: ...
    def span(self, node: int, kind: str, start_s: float, end_s: float, detail: str) -> None:
        """A node spent this time: kind "compute", "send" or "wait"; times in seconds."""
        ...

    def event(self, time_s: float, kind: str, node: int, detail: str) -> None:
        """Something worth a line: "crash", "back", "gone", "dropped", ..."""
        ...
