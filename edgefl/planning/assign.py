"""Cuts and shares for the fleet of a run: the planners' figures taken from profiles, links and the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from edgefl.devices import DeviceProfile
from edgefl.errors import ConfigError
from edgefl.keyed import generator
from edgefl.learning.learner import Learner
from edgefl.learning.workload import Workload
from edgefl.nodes.node import FleetView
from edgefl.nodes.plan import RunPlan
from edgefl.parameters.crossing import WHOLE, Packing
from edgefl.planning import hsfl
from edgefl.planning.edgesplit import (
    CutPlan,
    DeviceCosts,
    best_common_cut,
    common_cut,
    own_cuts_equal_rates,
    plan_cuts,
)
from edgefl.planning.split import SplitCost, raw_cost, refuse_clipping, split_cost


class EdgeSplitSettings(Protocol):
    """What of a method's settings the planner of EdgeSplit goes by."""

    plan: Any
    allow_local: bool
    own_link_caps: bool

    @property
    def packing(self) -> Packing: ...


class HSFLSettings(Protocol):
    """What of a method's settings the planner of HSFL goes by."""

    plan: Any
    allow_local: bool
    fading: float
    channels: int | None

    @property
    def packing(self) -> Packing: ...


@dataclass(frozen=True)
class SplitDevice:
    """One client as the planners see it. link_bytes_per_s: the slower direction of its own link."""

    name: str
    profile: DeviceProfile
    workload: Workload
    num_examples: int
    latency_s: float
    link_bytes_per_s: float


@dataclass(frozen=True)
class SplitFleet:
    """A server and its clients, in order of id. capacity_bytes_per_s: the server's link, each way."""

    seed: int
    learner: Learner
    server: DeviceProfile
    capacity_bytes_per_s: float
    ids: tuple[int, ...]
    devices: tuple[SplitDevice, ...]

    @classmethod
    def of(cls, view: FleetView, learner: Learner, seed: int) -> SplitFleet:
        """The clients of a star with node 0 in its middle."""
        ids, middle = view.ids("client"), view.access(0)
        devices = []
        for k in ids:
            profile, access = view.profile(k), view.access(k)
            own = min(access.up_bytes_per_s, access.down_bytes_per_s)
            name = f"{view.role(k)} {k} ({profile.name})"
            latency_s = view.latency_s(0, k)
            devices.append(SplitDevice(name, profile, view.workload(k), view.num_examples(k), latency_s, own))
        capacity = min(middle.up_bytes_per_s, middle.down_bytes_per_s)
        return cls(seed, learner, view.profile(0), capacity, ids, tuple(devices))

    def costs(
        self,
        packing: Packing = WHOLE,
        *,
        moves_front: bool = True,
        slowdowns: Sequence[float] | None = None,
    ) -> list[SplitCost]:
        """Each client's costs by cut; slowdowns: of its computing, by client."""
        factors = slowdowns or [1.0] * len(self.devices)
        return [
            split_cost(
                self.learner, d.profile, self.server, d.workload, d.num_examples,
                latency_s=d.latency_s, packing=packing, moves_front=moves_front, slowdown=factor,
            )
            for d, factor in zip(self.devices, factors, strict=True)
        ]  # fmt: skip

    def feasible(self, costs: SplitCost, device: SplitDevice, allow_local: bool) -> tuple[bool, ...]:
        """The cuts that a device may take: it has the memory for them; the whole model if that is allowed."""
        last = len(costs.device_s)
        return tuple(costs.fits(l, device.profile) and (allow_local or l < last) for l in range(1, last + 1))

    def measured(
        self,
        cuts: Sequence[int],
        busy_s: Mapping[int, float],
        known: Mapping[int, float],
        above: float | None,
    ) -> dict[int, float]:
        """How many times its profile's time each client takes, by id: as known, but for those whose computing
        at these cuts took `above` (a share) more or less than known."""
        new = dict(known)
        if above is None:
            return new
        for n, cost in enumerate(self.costs()):
            k = self.ids[n]
            planned_s = cost.device_s[cuts[n] - 1] if cuts[n] else 0.0
            if k in busy_s and planned_s > 0:
                factor = busy_s[k] / planned_s
                if abs(factor / known[k] - 1) > above:
                    new[k] = factor
        return new


def edgesplit_plan(
    fleet: SplitFleet, config: EdgeSplitSettings, slowdowns: Sequence[float] | None = None
) -> CutPlan:
    """The cuts and rates that the settings ask for."""
    devices = []
    N = len(fleet.devices)
    for device, cost in zip(fleet.devices, fleet.costs(config.packing, slowdowns=slowdowns), strict=True):
        fixed = zip(cost.device_s, cost.server_s, cost.latency_s, strict=True)
        cap = device.link_bytes_per_s if config.own_link_caps else math.inf
        may = fleet.feasible(cost, device, config.allow_local)
        devices.append(
            DeviceCosts(tuple(f + N * s + wait for f, s, wait in fixed), cost.link_bytes, may, cap)
        )
    B = fleet.capacity_bytes_per_s
    if config.plan == "alternating":
        return plan_cuts(devices, B)
    if config.plan == "own-cuts":
        return own_cuts_equal_rates(devices, B)
    if config.plan == "middle":
        return common_cut(devices, max(1, len(fleet.learner.model.blocks) // 2 + 1), B, share=False)
    return best_common_cut(devices, B, share=config.plan == "common-shared")


def hsfl_plan(
    fleet: SplitFleet, config: HSFLSettings, *, moves_front: bool, slowdowns: Sequence[float] | None = None
) -> hsfl.HSFLPlan:
    """The cuts and shares that the settings ask for."""
    clients = []
    B = fleet.capacity_bytes_per_s
    costs = fleet.costs(config.packing, moves_front=moves_front, slowdowns=slowdowns)
    for device, cost in zip(fleet.devices, costs, strict=True):
        alpha = tuple(a + wait for a, wait in zip(cost.device_s, cost.latency_s, strict=True))
        beta = tuple(size / B for size in cost.link_bytes)
        may = fleet.feasible(cost, device, config.allow_local)
        clients.append(hsfl.ClientCosts(alpha, beta, cost.server_s, may))
    if config.plan == "raw":
        return _nothing_at_clients(fleet, config)
    rng = generator(fleet.seed, "hsfl scenarios")
    fitness = hsfl.Fitness(clients, hsfl.scenarios(rng, len(clients), config.fading), config.channels)
    if config.plan == "common":
        return hsfl.best_common(clients, fitness)
    if config.plan == "common-equal":
        return hsfl.best_common_at_equal_shares(clients, fitness.scenarios)
    if config.plan == "own-cuts":
        return hsfl.at_equal_shares(clients, hsfl.own_cuts(clients), fitness.scenarios)
    if config.plan == "random":
        return hsfl.chosen(fitness, hsfl.random_cuts(clients, generator(fleet.seed, "hsfl cuts")))
    return hsfl.plan_by_genes(clients, fitness, generator(fleet.seed, "hsfl genes"))


def _nothing_at_clients(fleet: SplitFleet, config: HSFLSettings) -> hsfl.HSFLPlan:
    """Cut 0 for all, at the best shares."""
    rows = [
        raw_cost(fleet.learner, fleet.server, d.workload, d.num_examples, d.latency_s, config.packing)
        for d in fleet.devices
    ]
    waits, sizes, seconds = np.array(rows).T
    shares = hsfl.best_shares(waits, sizes / fleet.capacity_bytes_per_s, seconds)
    return hsfl.HSFLPlan((0,) * len(rows), shares, shares.round_s)


def planned_cuts(plan: RunPlan, view: FleetView) -> tuple[int, ...]:
    """Each client's cut, by the planner that the run's method has."""
    assert plan.learner is not None
    fleet = SplitFleet.of(view, plan.learner, plan.seed)
    if plan.method.name == "edgesplit":
        return edgesplit_plan(fleet, plan.config).cuts
    return hsfl_plan(fleet, plan.config, moves_front=plan.method.name == "hsfl-layerwise").cuts


def refuse_unfit(plan: RunPlan) -> None:
    """Raises ConfigError for a device without the memory for any cut, a model without a cut, or clipping."""
    assert plan.learner is not None
    model = plan.learner.model
    if len(model.blocks) < 2:
        raise ConfigError("model.name", model.name, f"a model of at least 2 blocks for {plan.method.name}")
    refuse_clipping(plan)
    view = FleetView(plan, 0, cast(Any, None))  # nobody is alive before the run, and nobody asks
    fleet = SplitFleet.of(view, plan.learner, plan.seed)
    may_all, common = plan.config.allow_local, np.ones(len(model.blocks), bool)
    for device, cost in zip(fleet.devices, fleet.costs(), strict=True):
        feasible = fleet.feasible(cost, device, may_all)
        common &= feasible
        if not any(feasible):
            accepted = f"{device.name} needs {min(cost.memory_bytes)} bytes for the smallest part"
            raise ConfigError("fleet.devices", device.profile.memory_bytes, accepted)
    if plan.config.plan in ("common", "common-shared", "common-equal", "middle") and not common.any():
        raise ConfigError(
            f"method.{plan.method.name}.plan", plan.config.plan, "no cut suits all devices' memory"
        )


def refuse_unfit_hsfl(plan: RunPlan) -> None:
    """As refuse_unfit, and ConfigError for fewer channels than clients, or equal shares of them, or tokens at
    cut 0."""
    refuse_unfit(plan)
    assert plan.learner is not None
    if plan.config.plan == "raw" and plan.learner.model.task == "language":
        raise ConfigError(f"method.{plan.method.name}.plan", "raw", "another: tokens have no gradient")
    channels, clients = plan.config.channels, len(plan.ids("client"))
    if channels is not None and plan.config.plan in ("common-equal", "own-cuts"):
        raise ConfigError(f"method.{plan.method.name}.channels", channels, "none where shares are equal")
    if channels is not None and channels < clients:
        raise ConfigError(
            f"method.{plan.method.name}.channels", channels, f"at least {clients}, one per client"
        )
