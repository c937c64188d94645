"""From [faults] to a plan of what goes wrong when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgefl.data import Dataset
from edgefl.errors import ConfigError
from edgefl.experiment.config import Experiment
from edgefl.keyed import generator
from edgefl.learning.poison import Poison, poisoned_data, with_flipped_labels
from edgefl.network.traces import read_columns
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
        crashes=(
            *crashes,
            *_churn(experiment, num_nodes, first_device),
            *_absences(experiment, num_nodes, first_device),
        ),
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


def _absences(experiment: Experiment, num_nodes: int, first_device: int) -> list[Crash]:
    """Departures of [faults] availability: a device is gone until it is there again."""
    table = experiment.faults.availability
    if table is None:
        return []
    if table.file is not None:
        return _absences_of_file(Path(table.file), num_nodes)
    until_s = table.until_s or experiment.stop.time_s
    if until_s is None:
        raise ConfigError("faults.availability.until_s", None, "it is needed where stop.time_s is not given")
    assert table.period_s is not None and table.up_share is not None
    up_s, down_s = table.up_share * table.period_s, (1 - table.up_share) * table.period_s
    crashes = []
    for node in range(first_device, num_nodes):
        phase = float(generator(experiment.seed, "availability", node - first_device).random())
        gone_s = up_s - phase * table.period_s  # where its day, begun before the run, first takes it away
        if gone_s + down_s <= 0:
            gone_s += table.period_s
        if gone_s < 0:  # it is away when the run begins
            crashes.append(Crash(node, 0.0, gone_s + down_s))
            gone_s += table.period_s
        while gone_s < until_s:
            crashes.append(Crash(node, gone_s, down_s))
            gone_s += table.period_s
    return crashes


def _absences_of_file(path: Path, num_nodes: int) -> list[Crash]:
    """What a file of time_s,node,up says. Raises ConfigError, with the line."""
    key = "faults.availability.file"
    rows = read_columns(path, key, ("time_s", "node", "up"))
    crashes, gone_at = [], dict[int, float]()
    last_s = 0.0
    for line, (time_s, node, up) in enumerate(rows, start=2):
        if time_s < last_s:
            accepted = f"line {line}: times that do not fall, not {time_s:g} after {last_s:g}"
            raise ConfigError(key, str(path), accepted)
        if not node.is_integer() or not 0 <= node < num_nodes or up not in (0, 1):
            accepted = f"line {line}: a node 0 to {num_nodes - 1}, and 1 or 0"
            raise ConfigError(key, str(path), accepted)
        last_s, i = time_s, int(node)
        if up == 0:
            gone_at.setdefault(i, time_s)
        elif i in gone_at:
            began_s = gone_at.pop(i)
            if time_s > began_s:
                crashes.append(Crash(i, began_s, time_s - began_s))
    crashes += [Crash(i, at_s) for i, at_s in sorted(gone_at.items())]
    return sorted(crashes, key=lambda crash: (crash.at_s, crash.node))


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
