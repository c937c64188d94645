"""Methods of peers over gRPC with a process for each node, from the very file that virtual time runs.

First as they are; then with nodes that start apart and only average, so that what averaging keeps shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scattered import KEEP_THE_MEAN, STAY_WITHIN, STILL, write_scattered
from toy import Watcher

from edgefl.data import Batch
from edgefl.experiment.build import Built, build
from edgefl.experiment.config import load_experiment
from edgefl.experiment.local import run_here, run_processes
from edgefl.experiment.observer import RunObserver
from edgefl.experiment.threads import one_thread
from edgefl.nodes.registry import methods
from edgefl.parameters import Vector
from edgefl.runtimes.outcome import Outcome
from edgefl.runtimes.virtual import VirtualRuntime

Run = Callable[[Path, Built, RunObserver], Outcome]
pytestmark = pytest.mark.slow

ROUNDS = 8
FILE = """
seed = 4
[method]
name = "{method}"
[method.{name}]
{settings}
[fleet]
devices = {{ raspberry-pi-4b = 3, jetson-nano = 2, laptop = 1 }}
[data]
name = "synthetic"
num_owners = 6
examples_per_owner = 60
[model]
hidden = [16]
[train]
local_steps = 2
[stop]
rounds = {rounds}
"""
SETTINGS = {"prague-static": "workers_per_machine = 3"} | dict.fromkeys(
    ("divshare", "divshare-adpsgd", "divshare-swift"), "recipients = 3"
)
PEERS = [m.name for m in methods().values() if m.family in ("decentralized", "collective")]
IN_STEP = (
    "choco-sgd", "combo", "d-psgd", "delay-by-one", "h-ring-psgd", "prague-static", "ring-allreduce", "sgp",
)  # fmt: skip
"""Methods whose messages and models do not depend on who is faster."""


def built_of(folder: Path, name: str, method: str = "", *overrides: str) -> Built:
    """Six devices of three kinds; method: a file in place of the registered method."""
    path = folder / "experiment.toml"
    more = {"name": name, "settings": SETTINGS.get(name, ""), "rounds": ROUNDS}
    path.write_text(FILE.format(method=method or name, **more))
    return build(load_experiment(path, overrides))


def in_virtual_time(built: Built) -> tuple[Outcome, dict[int, Vector]]:
    """The outcome, and each node's last model."""
    watcher = Watcher()
    with one_thread():
        outcome = VirtualRuntime(built.plan, watcher, built.executor).run()
    return outcome, {node: x for node, _, _, x in watcher.models}


def over_grpc(folder: Path, built: Built, run: Run) -> tuple[Outcome, dict[int, Vector]]:
    """The same over gRPC; all have made their rounds.

    The outcome's results are completed by what the others than node 0 published last.
    """
    (folder / "experiment.toml").write_text(built.experiment.to_toml())
    observer = RunObserver(built, hosted=(0,))
    with one_thread():
        outcome = run(folder, built, observer)
    observer.final(outcome)
    last = {i: x for i, (_, _, x) in outcome.last_models.items()}
    last |= {i: x for i, x in outcome.results.items() if isinstance(x, Vector)}
    assert (outcome.status, outcome.reason, outcome.dropped) == ("finished", "the method ended", {})
    assert set(last) == {i for i, spec in enumerate(built.plan.nodes) if spec.data is not None}
    assert {step for _, step, _ in outcome.last_models.values()} == {ROUNDS}
    return dataclasses.replace(outcome, results={**outcome.results, **last}), last


def assert_invariants_hold(built: Built, outcome: Outcome) -> None:
    held = {check.name: check.holds(outcome) for check in built.plan.method.invariants}
    assert held == dict.fromkeys(held, True)


def mean_loss(built: Built, models: dict[int, Vector]) -> float:
    """Of the nodes' models, on the test set."""
    learner, test = built.learner, Batch(built.dataset.x_test, built.dataset.y_test)
    return sum(learner.measure(x, test).loss for x in models.values()) / len(models)


def sizes(outcome: Outcome) -> dict[str, set[float]]:
    """Mean payload bytes of each kind of message, one for each pair of nodes."""
    found: dict[str, set[float]] = {}
    for (_, _, kind), (messages, payload, _) in outcome.traffic.table.items():
        found.setdefault(kind, set()).add(payload / messages)
    return found


@pytest.mark.parametrize("name", PEERS)
def test_six_processes_come_to_what_virtual_time_says(tmp_path: Path, name: str) -> None:
    built = built_of(tmp_path, name)
    virtual, expected = in_virtual_time(built)
    outcome, models = over_grpc(tmp_path, built, run_processes)
    assert_invariants_hold(built, outcome)
    if name in IN_STEP:
        assert outcome.traffic.table == virtual.traffic.table
        for i, x in models.items():
            assert float((x - expected[i]).values.norm()) <= 1e-5 * float(x.values.norm())
    start = mean_loss(built, dict.fromkeys(models, built.learner.model.init()))
    learned = start - mean_loss(built, expected)
    assert learned > 0 and start - mean_loss(built, models) >= learned / 2
    fixed = {kind: size for kind, size in sizes(virtual).items() if len(size) == 1}
    assert {kind: size for kind, size in sizes(outcome).items() if kind in fixed} == fixed


@pytest.mark.parametrize("name", [*KEEP_THE_MEAN, *STAY_WITHIN])
def test_averaging_alone_keeps_over_grpc_what_it_should(tmp_path: Path, name: str) -> None:
    """Six ports in one process: what crosses them is the same."""
    built = built_of(tmp_path, name, write_scattered(tmp_path, name), STILL)
    outcome, models = over_grpc(tmp_path, built, run_here)
    assert_invariants_hold(built, outcome)
    starts = dict.fromkeys(models, built.learner.model.init())
    assert all(not torch.equal(x.values, starts[i].values) for i, x in models.items())


@pytest.mark.parametrize("name", ["ad-psgd", "moshpit-sgd", "prague"])
def test_it_does_so_in_six_processes_too(tmp_path: Path, name: str) -> None:
    built = built_of(tmp_path, name, write_scattered(tmp_path, name), STILL)
    assert_invariants_hold(built, over_grpc(tmp_path, built, run_processes)[0])
