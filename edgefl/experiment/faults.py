"""From [faults] to a plan of what goes wrong when."""

from __future__ import annotations

from edgefl.errors import ConfigError
from edgefl.experiment.config import Experiment
from edgefl.keyed import generator
from edgefl.nodes.plan import Crash, FaultPlan, Partition


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
