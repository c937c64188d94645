"""From an experiment to what a runtime is given: the plan, the executor, the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgefl.data import Dataset, LocalData, load_dataset, partition
from edgefl.devices import DeviceProfile, device
from edgefl.errors import ConfigError, nearest
from edgefl.experiment.config import Experiment
from edgefl.experiment.faults import fault_plan, poisoned
from edgefl.experiment.tables import Roles, bytes_per_s
from edgefl.experiment.threads import one_thread
from edgefl.keyed import generator
from edgefl.learning.executors import Executor, make_executor
from edgefl.learning.learner import Learner
from edgefl.learning.models import build_model
from edgefl.learning.workload import Workload
from edgefl.network import (
    Access,
    NetworkPlan,
    Topology,
    Trace,
    drawn_trace,
    make_mixing,
    make_topology,
    parse_link,
    read_trace,
)
from edgefl.nodes import Method
from edgefl.nodes.plan import NodeSpec, RunPlan, Thermal
from edgefl.parameters.compress import CompressConfig
from edgefl.planning.memory import refuse_beyond_memory
from edgefl.planning.workloads import (
    Assignment,
    Fleet,
    NarrowTraining,
    assign,
    assigned,
    refuse_too_large,
    replanner,
)

TASK_METRICS = {
    "classification": ("accuracy", "loss"),
    "regression": ("rmse", "loss"),
    "language": ("perplexity", "accuracy", "loss"),
}
"""What the evaluation of each task yields, its own metric first."""
_OWN_TOPOLOGY = {"star": "star", "complete": "complete"}
_DEFAULT_TOPOLOGY = {"bipartite": "bipartite-complete", "connected": "ring", "any": "ring"}


@dataclass(frozen=True)
class Built:
    """experiment: as decided. parts: the data of each node that holds some, in order of id.

    metric: what the run is measured by, the target's or the task's first. fleet, assignment: what
    was planned for, and the shares. memory: bytes that each node needs at once, where the method says so.
    """

    experiment: Experiment
    plan: RunPlan
    executor: Executor
    dataset: Dataset
    parts: list[LocalData]
    metric: str
    fleet: Fleet
    assignment: Assignment
    memory: Mapping[int, int] | None

    @property
    def learner(self) -> Learner:
        assert self.plan.learner is not None
        return self.plan.learner


@one_thread()
def build(experiment: Experiment) -> Built:
    """Put a run together. Raises ConfigError for whatever cannot be, before anything starts."""
    experiment = experiment.decided()
    method, config = experiment.method.method, experiment.method.config
    dataset = load_dataset(experiment.data)
    metric = _metric(experiment, dataset)
    helpers = method.helper_roles(config)
    first_device = max(len(helpers), int(method.has_server))
    parts, profiles, names = _members(experiment, method, dataset, helpers)
    topology = _topology(experiment, method, len(profiles))
    learner = _learner(experiment, dataset)
    network = _network(experiment, topology, names, first_device)
    nodes = _nodes(experiment, topology, parts, profiles, first_device)
    fleet = Fleet.of(nodes, network, learner, *_narrow(experiment, method, config))
    assignment = assign(fleet, experiment.assign)
    nodes = assigned(nodes, assignment)
    if method.memory is None:
        refuse_too_large(fleet, assignment)
    plan = RunPlan(
        seed=experiment.seed,
        method=method,
        config=config,
        nodes=nodes,
        network=network,
        learner=learner,
        rounds=experiment.stop.rounds,
        time_s=experiment.stop.time_s,
        mixing=make_mixing(experiment.network.mixing, topology) if method.needs == "connected" else None,
        faults=fault_plan(experiment, len(profiles), first_device),
        groups=assignment.groups,
        compress=_compress(experiment, method),
        replan=replanner(fleet, experiment.assign, assignment),
    )
    if method.prepare is not None:
        method.prepare(plan)
    memory = None if method.memory is None else method.memory(plan)
    if memory is not None:
        refuse_beyond_memory(plan, memory)
    execution = experiment.execution
    executor = make_executor(execution.executor, learner, execution.group, execution.workers)
    return Built(experiment, plan, executor, dataset, parts, metric, fleet, assignment, memory)


def _narrow(
    experiment: Experiment, method: Method, config: Any
) -> tuple[tuple[float, ...], NarrowTraining | None]:
    """The widths that may be planned, and what is trained at one. Raises ConfigError where none may be."""
    if experiment.assign.policy != "width":
        return (), None
    if method.widths is None:
        raise ConfigError("assign.policy", "width", f"another policy: {method.name} trains the whole model")
    training = method.narrow_training
    return method.widths(config), None if training is None else partial(training, config)


def _metric(experiment: Experiment, dataset: Dataset) -> str:
    known, target = TASK_METRICS[dataset.task], experiment.stop.target
    metric = known[0] if target is None or target.metric is None else target.metric
    if metric not in known:
        raise ConfigError("stop.target.metric", metric, f"{dataset.name} is measured by {' or '.join(known)}")
    if target is not None:
        target.check(metric)
    return metric


def _members(
    experiment: Experiment, method: Method, dataset: Dataset, helpers: tuple[str, ...]
) -> tuple[list[LocalData], list[DeviceProfile], list[str]]:
    """The data of those that hold some; the profile and the written name of every node, by id."""
    names = [name for name, count in experiment.fleet.devices.items() for _ in range(count)]
    parts = partition(dataset, len(names), experiment.data.partition, experiment.seed)
    roles = experiment.fleet.roles
    if method.pools_data:
        everything = np.sort(np.concatenate([part.indices for part in parts]))
        parts = [LocalData(dataset, everything, 0, experiment.seed)]
        return parts, [device(roles.server, "fleet.roles.server")], ["server"]
    beside = {role: device(getattr(roles, role), f"fleet.roles.{role}") for role in helpers}
    profiles = [*(beside[role] for role in helpers), *(device(name) for name in names)]
    return parts, profiles, [*helpers, *names]


def _topology(experiment: Experiment, method: Method, n: int) -> Topology:
    """The method's own graph, or the file's where the method leaves it open."""
    given = experiment.network.topology
    if method.pools_data or method.needs in _OWN_TOPOLOGY:
        return make_topology(_OWN_TOPOLOGY.get(method.needs, "complete"), n, experiment.seed)
    topology = make_topology(given or _DEFAULT_TOPOLOGY[method.needs], n, experiment.seed)
    if method.needs == "bipartite" and not topology.is_bipartite():
        accepted = f"{method.name} needs a bipartite graph (no odd cycle), such as bipartite-complete"
        raise ConfigError("network.topology", topology.name, accepted)
    if not topology.is_connected():
        reached = len(topology.distances(0))
        raise ConfigError(
            "network.topology", topology.name, f"a connected graph; node 0 reaches {reached} of {n}"
        )
    return topology


def _nodes(
    experiment: Experiment,
    topology: Topology,
    parts: list[LocalData],
    profiles: list[DeviceProfile],
    first_device: int,
) -> tuple[NodeSpec, ...]:
    workload = Workload.of(experiment.train)
    roles = experiment.method.method.roles_of(topology, experiment.method.config)
    data: list[LocalData | None] = [*[None] * (len(profiles) - len(parts)), *parts]
    stragglers = experiment.fleet.stragglers or {}
    slowdowns = _factors(experiment, stragglers, "fleet.stragglers", len(profiles), first_device)
    nodes = [
        NodeSpec(roles[i], profile, workload, data[i], slowdowns[i]) for i, profile in enumerate(profiles)
    ]
    nodes = [node if i < first_device else _burdened(experiment, node, i - first_device)
             for i, node in enumerate(nodes)]  # fmt: skip
    return tuple(poisoned(experiment, nodes, first_device))


TRACE_S = 3600.0
"""Seconds after which what is drawn of a run without stop.time_s begins again."""


def _burdened(experiment: Experiment, node: NodeSpec, device: int) -> NodeSpec:
    """A device with the other programs, the heat and the battery of [fleet]."""
    fleet = experiment.fleet
    speed: Trace | None = None
    if (load := fleet.background) is not None:
        speed = drawn_trace(
            experiment.seed, "background", device, high=1.0, low=1 - load.load,
            mean_high_s=load.mean_off_s, mean_low_s=load.mean_on_s, until_s=_horizon_s(experiment),
        )  # fmt: skip
    heat = fleet.thermal
    thermal = None if heat is None else Thermal(heat.after_s, heat.recover_s, heat.slowdown)
    battery_j: float | None = None
    if (battery := fleet.battery) is not None:
        if node.profile.idle_w is None or node.profile.busy_w is None:
            accepted = f"devices with idle_w and busy_w; {node.profile.name} has no power figures"
            raise ConfigError("fleet.battery", battery.capacity_wh, accepted)
        battery_j = battery.capacity_wh * 3600 * battery.level
    return replace(node, speed=speed, thermal=thermal, battery_j=battery_j)


def _horizon_s(experiment: Experiment) -> float:
    return experiment.stop.time_s or TRACE_S


def _traces(experiment: Experiment, names: list[str], first_device: int) -> dict[int, Trace]:
    """What [network] traces make of each node's rates. Raises ConfigError for wrong names and files."""
    written = experiment.network.traces
    known = {"default", *names}
    for name, one in written.items():
        if name not in known:
            accepted = f"no such device here; {nearest(name, known)}"
            raise ConfigError(f"network.traces.{name}", str(one), accepted)
    files = {
        name: read_trace(Path(one), f"network.traces.{name}", most=1e6)
        for name, one in written.items()
        if isinstance(one, str)
    }
    traces = {}
    for i, name in enumerate(names):
        chosen = name if name in written else "default"
        if chosen not in written or (chosen == "default" and i < first_device):
            continue
        one = written[chosen]
        if isinstance(one, str):
            traces[i] = files[chosen]
        else:
            traces[i] = drawn_trace(
                experiment.seed, "link trace", i - first_device, high=1.0, low=one.low,
                mean_high_s=one.mean_high_s, mean_low_s=one.mean_low_s, until_s=_horizon_s(experiment),
            )  # fmt: skip
    return traces


def _compress(experiment: Experiment, method: Method) -> CompressConfig:
    if experiment.compress.on and not method.compresses:
        accepted = f"none: {method.name} does not send updates that can be compressed"
        raise ConfigError("compress.name", experiment.compress.name, accepted)
    return experiment.compress


def _factors(
    experiment: Experiment, given: Mapping[str, float], key: str, n: int, first_device: int
) -> list[float]:
    """How many times slower each node is; drawn by device: all methods and tables have the same."""
    slowdowns = [1.0] * n
    if "share" in given:
        num_devices = experiment.num_devices
        order = generator(experiment.seed, "stragglers").permutation(num_devices)
        for i in order[: round(given["share"] * num_devices)]:
            if first_device + i < n:
                slowdowns[first_device + int(i)] = given["slowdown"]
        return slowdowns
    for word, factor in given.items():
        if int(word) >= n:
            raise ConfigError(f"{key}.{word}", factor, f"nodes 0 to {n - 1}")
        slowdowns[int(word)] = factor
    return slowdowns


def _network(experiment: Experiment, topology: Topology, names: list[str], first_device: int) -> NetworkPlan:
    network = experiment.network
    written = network.links
    known = {"default", *Roles.model_fields, *experiment.fleet.devices}
    for name in written:
        if name not in known:
            raise ConfigError(
                f"network.link.{name}", written[name], f"no such device here; {nearest(name, known)}"
            )
    links = {name: parse_link(one, f"network.link.{name}") for name, one in written.items()}
    n = len(names)
    for cap in network.caps:
        if not (0 <= cap.sender < n and 0 <= cap.receiver < n):
            raise ConfigError("network.caps", (cap.sender, cap.receiver), f"a pair of nodes 0 to {n - 1}")
    thinner = _factors(experiment, network.stragglers or {}, "network.stragglers", n, first_device)
    access = tuple(
        _thin(links.get(name, links["default"]), by) for name, by in zip(names, thinner, strict=True)
    )
    assert network.link_model is not None
    return NetworkPlan(
        topology=topology,
        access=access,
        link_model=network.link_model,
        segments={k: bytes_per_s(v, f"network.segments.{k}") for k, v in network.segments.items()},
        path_bytes_per_s=math.inf if network.path is None else bytes_per_s(network.path, "network.path"),
        traces=_traces(experiment, names, first_device),
        caps={(cap.sender, cap.receiver): bytes_per_s(cap.rate, "network.caps") for cap in network.caps},
    )


def _thin(access: Access, factor: float) -> Access:
    """The same link with an uplink so many times slower."""
    return access.model_copy(update={"up_bytes_per_s": access.up_bytes_per_s / factor})


def _learner(experiment: Experiment, dataset: Dataset) -> Learner:
    where = experiment.execution.device
    if where == "cuda" and not torch.cuda.is_available():
        raise ConfigError("execution.device", "cuda", "cpu: PyTorch finds no CUDA device on this machine")
    model = build_model(experiment.model, dataset, experiment.seed)
    return Learner(model, experiment.train, total_rounds=experiment.stop.rounds, device=where)
