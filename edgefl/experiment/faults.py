"""From [faults] to a plan of what goes wrong when."""

from __future__ import annotations

from dataclasses import replace

from edgefl.data import Dataset
from edgefl.errors import ConfigError
from edgefl.experiment.config import Experiment
from edgefl.keyed import generator
from edgefl.learning.poison import Poison, poisoned_data, with_flipped_labels
from edgefl.nodes.plan import Crash, FaultPlan, NodeSpec, Partition


def fault_plan(experiment: Experiment, num_nodes: int, first_device: int) -> FaultPlan:
    """All faults of a run, drawn before it begins. first_device: the id of the fleet's first device.

    Raises ConfigError for nodes that do not exist, and for churn without an end.
    """
    faults = experiment.faults
    for i, crash in enumerate(faults.crashes):
        _check(crash.node, num_nodes, f"faults.crashes.{i}.node")
    for i, table in enumerate(faults.partitions):
        for node in table.nodes:
            _check(node, num_nodes, f"faults.partitions.{i}.nodes")
    crashes = [Crash(crash.node, crash.at_s, crash.down_s) for crash in faults.crashes]
    return FaultPlan(
        crashes=(*crashes, *_churn(experiment, num_nodes, first_device)),
        partitions=tuple(Partition(frozenset(p.nodes), p.at_s, p.for_s) for p in faults.partitions),
        detect_s=faults.detect_s,
        compute_jitter=faults.compute_jitter,
    )


def poisoned(experiment: Experiment, nodes: list[NodeSpec], first_device: int) -> list[NodeSpec]:
    """The nodes, the hostile ones among the devices made so; drawn by device, the same for all methods.

    Raises ConfigError for flipped labels where there are none.
    """
    poison = experiment.faults.poison
    if poison is None:
        return nodes
    num_devices = experiment.num_devices
    order = generator(experiment.seed, "poisoned").permutation(num_devices)
    chosen = [first_device + int(i) for i in order[: round(poison.share * num_devices)]]
    flipped: Dataset | None = None
    for i in chosen:
        if i >= len(nodes) or (data := nodes[i].data) is None:
            continue
        if poison.kind != "label-flip":
            nodes[i] = replace(nodes[i], poison=Poison(poison.kind, poison.scale))
            continue
        if data.dataset.task != "classification":
            accepted = f"another kind: {data.dataset.name} has no labels to flip"
            raise ConfigError("faults.poison.kind", poison.kind, accepted)
        flipped = flipped or with_flipped_labels(data.dataset)
        nodes[i] = replace(nodes[i], data=poisoned_data(data, flipped))
    return nodes


def _check(node: int, num_nodes: int, key: str) -> None:
    if node >= num_nodes:
        raise ConfigError(key, node, f"nodes 0 to {num_nodes - 1}")


def _churn(experiment: Experiment, num_nodes: int, first_device: int) -> list[Crash]:
    """Crashes of every device as a renewal process; streams go by device, the same for all methods."""
    churn = experiment.faults.churn
    if churn is None:
        return []
    until_s = churn.until_s or experiment.stop.time_s
    if until_s is None:
        raise ConfigError("faults.churn.until_s", None, "it is needed where stop.time_s is not given")
    crashes = []
    for node in range(first_device, num_nodes):
        rng = generator(experiment.seed, "churn", node - first_device)
        at_s = float(rng.exponential(churn.mean_up_s))
        while at_s < until_s:
            down_s = float(rng.exponential(churn.mean_down_s))
            crashes.append(Crash(node, at_s, down_s))
            at_s += down_s + float(rng.exponential(churn.mean_up_s))
    return crashes
