"""Killed at any event and resumed: the same trace and the same bytes as if nothing had happened."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from small import make_executor, small_plan
from toy import Watcher

from edgefl.errors import ConfigError
from edgefl.learning.poison import Poison
from edgefl.network import Trace
from edgefl.nodes.plan import Thermal
from edgefl.planning.workloads import AssignConfig, Fleet, assign, assigned, replanner
from edgefl.runtimes.virtual import VirtualRuntime
from edgefl.runtimes.virtual.checkpoint import restore_checkpoint, take_checkpoint

METHODS = [
    "fedavg",
    "d-psgd",
    "ad-psgd",
    "fedasync",
    "divshare",
    "divshare-adpsgd",
    "divshare-swift",
    "swift",
    "prague",
    "ring-allreduce",
    "split-learning",
    "split-learning-u",
    "splitfed-v1",
    "splitfed-v2",
    "parallel-split",
    "edgesplit",
    "hsfl",
    "hsfl-layerwise",
    "dapple",
    "gpipe",
    "fedprox",
    "fedbuff",
    "fedadam",
    "fednova",
    "scaffold",
    "bsp",
    "ssp",
    "median",
    "hierarchical-fedavg",
    "fedavg top-k",
    "fedasync top-k",
    "ssp top-k",
    "fedavg poisoned",
    "fedasync burdened",
    "choco-sgd top-k",
    "asyncdrop",
    "fjord",
    "fedcore",
    "fedcore top-k",
    "asyncdrop random previous",
    "combo",
    "sgp",
    "sgp drawn",
    "moshpit-sgd",
    "h-adpsgd",
    "h-ring-psgd",
    "delay-by-one",
    "adsp",
    "adsp interval",
    "adacomm",
    "fixed-adacomm",
    "fedavg replanned",
    "d-psgd replanned",
]
CONFIGS = {
    "fedprox": {"budget_s": 0.001, "over_selection": 0.5, "client_fraction": 0.5},
    "fedbuff": {"buffer_size": 3, "server_momentum": 0.9},
    "scaffold": {"option": "I", "client_fraction": 0.5},
    "ssp": {"max_ahead": 1, "reads": "complete"},
    "top-k": {"compress": {"name": "top-k", "fraction": 0.05}},
    "interval": {"timer": "interval", "server_momentum": 0.5, "commits_per_period": 2},
    "random": {"masks": "random"},
    "drawn": {"graph": "random"},
    "previous": {"reference": "previous"},
    "poisoned": {"poison": {2: Poison("noise", 0.1)}},
}


class _Keeper:
    """Takes a checkpoint after every event."""

    def __init__(self) -> None:
        self.taken: list[tuple[bytes, int]] = []

    def due(self) -> bool:
        return True

    def write(self, runtime: VirtualRuntime) -> None:
        watcher = runtime.observer
        state = {name: list(getattr(watcher, name)) for name in ("spans", "events", "metrics", "models")}
        self.taken.append((take_checkpoint(runtime, state), runtime.num_events))


def _trace(watcher: Watcher, outcome) -> tuple:
    models = [(n, t, k, v.values.numpy().tobytes()) for n, t, k, v in watcher.models]
    return (
        watcher.spans,
        watcher.events,
        repr(watcher.metrics),
        models,
        outcome.traffic.table,
        outcome.time_s,
    )


def _plan(method: str):
    name, *_ = words = method.split()
    config = {"recipients": 2} if method.startswith("divshare") else {}
    for word in words:
        config |= CONFIGS.get(word, {})
    if method == "split-learning-u":
        config = {"model": {"hidden": (32, 16)}}  # three blocks: it needs a middle
    if method in ("dapple", "gpipe"):
        config = {"stages": ((1, 2), (2, 2)), "micro_batches": 2}
    train, slowdowns = {"momentum": 0.5}, [1, 2, 3, 4, 5, 6, 7]
    if name == "fedcore":  # nodes 3 and 4 turn out to be stragglers
        train |= {"local_steps": None, "local_epochs": 3}
        slowdowns, config = [1, 1, 1, 1.5, 2], config | {"straggler_share": 0.0}
    if "replanned" in words:
        return _replanned(small_plan(name, 4, rounds=5, train=train, slowdowns=slowdowns, link_model="fair"))
    if "burdened" in words:
        return _burdened(small_plan(name, 4, rounds=40, train=train, link_model="fair"))
    return small_plan(name, 4, rounds=2, train=train, slowdowns=slowdowns, **config)


def _replanned(plan):
    """A device that soon has a third of its processor, and plans its work anew."""
    config = AssignConfig(policy="deadline", replan_above=0.2)
    fleet = Fleet.of(plan.nodes, plan.network, plan.learner)
    found = assign(fleet, config)
    nodes = list(assigned(plan.nodes, found))
    nodes[1] = replace(nodes[1], speed=Trace((0.0, found.round_s), (1.0, 1 / 3)))
    return replace(plan, nodes=tuple(nodes), replan=replanner(fleet, config, found))


def _burdened(plan):
    """Links that change, other programs, heat, and a battery that runs flat on the way."""
    trace = Trace((0.0, 0.001), (1.0, 0.3), period_s=0.003)
    nodes = list(plan.nodes)
    for i in (1, 2, 3):
        powered = nodes[i].profile.model_copy(update={"idle_w": 1.0, "busy_w": 3.0})
        nodes[i] = replace(nodes[i], profile=powered, speed=trace, thermal=Thermal(0.002, 0.01, 2.0))
    nodes[3] = replace(nodes[3], battery_j=0.02)
    network = replace(plan.network, traces={1: trace, 2: trace})
    return replace(plan, nodes=tuple(nodes), network=network)


@pytest.mark.parametrize("method", METHODS)
def test_resumed_at_every_event_the_run_is_the_same(method):
    keeper, watcher = _Keeper(), Watcher()
    plan = _plan(method)
    outcome = VirtualRuntime(plan, watcher, make_executor("auto", plan.learner), keeper).run()
    whole = _trace(watcher, outcome)
    assert len(keeper.taken) > 10
    assert ("replanned" in method) == any(kind == "replanned" for _, kind, _, _ in watcher.events)
    for data, _ in keeper.taken[:: max(1, len(keeper.taken) // 60)]:
        again, fresh = Watcher(), _plan(method)
        runtime = VirtualRuntime(fresh, again, make_executor("auto", fresh.learner), _Never())
        for name, rows in restore_checkpoint(runtime, data).items():
            setattr(again, name, rows)
        assert _trace(again, runtime.run()) == whole


class _Never:
    def due(self) -> bool:
        return False

    def write(self, runtime: VirtualRuntime) -> None:
        raise AssertionError("never due")


def test_numbers_and_arrays_of_numpy_are_kept():
    """Also those that NumPy rebuilds by functions of its own: scalars, and arrays with gaps."""
    plan = _plan("fedavg")
    runtime = VirtualRuntime(plan, Watcher(), make_executor("auto", plan.learner))
    known = {"loss": np.float64(1.5), "count": np.int64(4), "gaps": np.arange(6)[::2]}
    again = VirtualRuntime(plan, Watcher(), make_executor("auto", plan.learner))
    found = restore_checkpoint(again, take_checkpoint(runtime, known))
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in known.items()
    }
    assert (found["loss"], found["count"], found["gaps"].tolist()) == (1.5, 4, [0, 2, 4])


def test_a_foreign_file_is_refused_and_runs_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "evil"), "w"))

    plan = _plan("fedavg")
    for data in (b"", b"nonsense", pickle.dumps(Evil()), pickle.dumps(({}, {}))):
        runtime = VirtualRuntime(plan, Watcher(), make_executor("auto", plan.learner))
        with pytest.raises(ConfigError, match="own checkpoint"):
            restore_checkpoint(runtime, data)
    assert not (tmp_path / "evil").exists()
