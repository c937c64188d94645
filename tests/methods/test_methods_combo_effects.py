"""Combo on digits: more rounds than FedAvg through one server, and far shorter ones on thin paths."""

from __future__ import annotations

import dataclasses
import math
from statistics import mean
from typing import Any

import pytest
from effects import Accuracy, step_s
from small import make_executor, small_plan
from toy import access

from edgefl.nodes.plan import RunPlan
from edgefl.runtimes.virtual import VirtualRuntime

pytestmark = pytest.mark.slow
WORKERS, TAU, TARGET, SEEDS = 20, 5, 0.85, range(3)
U = 1.0
"""u: seconds in which a model passes an access link; a path holds a tenth of its rate."""


def plan_of(method: str, seed: int, work_u: float, rounds: int, **config: Any) -> RunPlan:
    """20 workers of Dirichlet(0.5) data; a local phase of 5 steps takes work_u units; all links alike."""
    C = 4 * 4810 / U
    train = {"local_steps": TAU, "batch_size": 16, "learning_rate": 0.1}
    data = {"name": "dirichlet", "alpha": 0.5, "min_examples": 8}
    plan = small_plan(
        method, WORKERS, rounds=rounds, seed=seed, train=train, data=data, access=access(C),
        link_model="fair", **config,
    )  # fmt: skip
    slowdown = work_u * U / TAU / step_s(plan, 1)
    nodes = tuple(dataclasses.replace(spec, slowdown=slowdown) for spec in plan.nodes)
    return dataclasses.replace(
        plan, nodes=nodes, network=dataclasses.replace(plan.network, path_bytes_per_s=C / 10)
    )


class Watch(Accuracy):
    """Counts the rounds too, up to the target."""

    rounds = 0

    def published(self, node: int, time_s: float, step: int, parameters: Any, part: str | None) -> bool:
        self.rounds = max(self.rounds, step)
        return super().published(node, time_s, step, parameters, part)


def wide_server(plan: RunPlan, *, free_paths: bool) -> RunPlan:
    """The same with twenty times the access rate at the server; free_paths: no cap on its flows either."""
    network = plan.network
    links = (access(20 * 4 * 4810 / U), *network.access[1:])
    pairs = [pair for i in range(1, WORKERS + 1) for pair in ((0, i), (i, 0))] if free_paths else []
    network = dataclasses.replace(network, access=links, caps=dict.fromkeys(pairs, math.inf))
    return dataclasses.replace(plan, network=network)


def to_target(
    method: str, seed: int, work_u: float = 10.0, free_paths: bool | None = None, **config: Any
) -> tuple[int, float]:
    """Rounds and units of time until single workers (FedAvg: the server) reach 0.85.

    free_paths: of a wide server; None: the server's link is as the others.
    """
    plan = plan_of(method, seed, work_u, 120, **config)
    if free_paths is not None:
        plan = wide_server(plan, free_paths=free_paths)
    watcher = Watch(plan, max(2.0, work_u / 2) * U, (TARGET,), "each")
    if method == "fedavg":
        watcher.now = {0: plan.learner.model.init()}
    VirtualRuntime(plan, watcher, make_executor("auto", plan.learner)).run()
    return watcher.rounds, watcher.times[TARGET] / U


PAPER = {"segments": 9, "replicas": 2}


def means(method: str, work_u: float = 10.0, **config: Any) -> tuple[float, float]:
    """Mean rounds and mean units of time, of 3 seeds."""
    rounds, times = zip(*(to_target(method, s, work_u, **config) for s in SEEDS), strict=True)
    return mean(rounds), mean(times)


def test_rounds_and_time_with_ten_units_of_work():
    """Rounds to 0.85: FedAvg 13, R=2 S=9 21, R=2 S=1 25, R=1 S=1 33; units of time 604, 263, 495, 661."""
    fedavg, combo, plain = means("fedavg"), means("combo", **PAPER), means("combo", segments=1, replicas=2)
    assert combo[0] <= 1.9 * fedavg[0] and combo[0] <= plain[0]
    assert fedavg[1] >= 2 * combo[1]


def test_the_gain_follows_from_what_a_round_communicates():
    """With one unit of work 7 times faster; with a thousand 1.6 times slower, as it needs more rounds."""
    assert means("fedavg", 1.0)[1] >= 5 * means("combo", 1.0, **PAPER)[1]
    assert means("fedavg", 1000.0)[1] <= means("combo", 1000.0, **PAPER)[1]


def test_a_server_with_a_wide_link_takes_the_gain_away_where_its_paths_are_wide_too():
    """Twenty times the rate at the server: FedAvg after 155 units of time, Combo after 263. Where a path to
    the server holds a tenth of a worker's link, as all others do, a model takes 10 units yet: after 385."""
    combo = means("combo", **PAPER)[1]
    assert means("fedavg", free_paths=True)[1] < combo < means("fedavg", free_paths=False)[1]
