"""Peers that are often absent: what finding groups is worth against all-reduce that starts anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from statistics import mean
from typing import Any

import pytest
from effects import Accuracy, step_s, times_to
from small import make_executor, small_plan
from toy import access

from edgefl.keyed import generator
from edgefl.learning.work import LocalSGD
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector, WeightedMean
from edgefl.runtimes.virtual import VirtualRuntime

pytestmark = pytest.mark.slow
STEP_S, MODEL_S, TAU, PEERS, ABSENCE, TARGET = 0.1, 0.154, 5, 16, 0.1, 0.9
PHASE_S, ALL_REDUCE_S = TAU * STEP_S, 2 * 15 / 16 * MODEL_S
ANYBODY_ABSENT = 1 - (1 - ABSENCE) ** PEERS
SHARDS = {"name": "shards", "shards_per_node": 2}
SEEDS = range(3)


def plan_of(seed: int, rounds: int, data: object, **plan: Any) -> RunPlan:
    """16 peers; a step takes 0.1 s, a model 0.154 s on every uplink; downlinks do not count."""
    train = {"local_steps": TAU, "batch_size": 16, "learning_rate": 0.1}
    links = access(4 * 4810 / MODEL_S, 1e9, latency_s=1e-3)
    made = small_plan(
        "moshpit-sgd", PEERS, rounds=rounds, seed=seed, train=train, access=links, data=data, **plan
    )
    slowdown = STEP_S / step_s(made, 0)
    return dataclasses.replace(
        made, nodes=tuple(dataclasses.replace(n, slowdown=slowdown) for n in made.nodes)
    )


def watch(
    seed: int, data: object, *, rounds: int = 150, of: str = "mean", target: float, **plan: Any
) -> Accuracy:
    made = plan_of(seed, rounds, data, **{"absence": ABSENCE, **plan})
    watcher = Accuracy(made, 0.05, (target,), of)
    VirtualRuntime(made, watcher, make_executor("auto", made.learner)).run()
    watcher.look()
    return watcher


EVERYBODY = ((tuple(range(PEERS)),),)
ROWS = tuple(tuple(range(4 * r, 4 * r + 4)) for r in range(4))
GRID = (ROWS, tuple(zip(*ROWS, strict=True)))
"""Two group rounds: the rows of a grid, then its columns."""


def in_rounds(
    seed: int, absence: float, data: object, rounds: int, groupings: Any = EVERYBODY
) -> Iterator[list[Vector]]:
    """The peers' models after each round of local SGD and means of those of each group who are present."""
    plan = plan_of(seed, rounds, data)
    learner = plan.learner
    assert learner is not None
    models = [learner.model.init()] * PEERS
    for t in range(rounds):
        work = [LocalSGD(x, n.data, t, n.workload) for x, n in zip(models, plan.nodes, strict=True)]
        models = [r.parameters for r in make_executor("auto", learner).run(work)]
        present = [generator(seed, "absent", i, t).random() >= absence for i in range(PEERS)]  # as peers draw
        for groups in groupings:
            for group in groups:
                members = [i for i in group if present[i]]
                mean_model = WeightedMean(learner.model.layout)
                for i in members:
                    mean_model.add(models[i])
                for i in members:
                    models[i] = mean_model.value(models[i])
        yield models


def accuracy(seed: int, data: object, models: list[Vector], of: str) -> float:
    watcher = Accuracy(plan_of(seed, 1, data), 1.0, (2.0,), of)
    watcher.now = dict(enumerate(models))
    watcher.tick(0.0)
    return watcher.accuracy


def rounds_of_all_reduce(seed: int, absence: float) -> int:
    rounds = enumerate(in_rounds(seed, absence, "iid", 100))
    return next(t + 1 for t, models in rounds if accuracy(seed, "iid", models, "mean") >= TARGET)


def test_moshpit_is_faster_than_all_reduce_that_restarts():
    """Seconds to 0.90, means of 3 seeds: restarting 39, restarting once among survivors 19, Moshpit 16."""
    attempts = 1 / (1 - ANYBODY_ABSENT)
    restarting_s = PHASE_S + attempts * ALL_REDUCE_S
    survivors_s = PHASE_S + (1 + ANYBODY_ABSENT) * ALL_REDUCE_S
    moshpit = mean(watch(s, "iid", target=TARGET).times[TARGET] for s in SEEDS)
    restarting = restarting_s * mean(rounds_of_all_reduce(s, 0.0) for s in SEEDS)
    survivors = survivors_s * mean(rounds_of_all_reduce(s, ABSENCE) for s in SEEDS)
    assert restarting >= 1.8 * moshpit and survivors >= 1.0 * moshpit


def single_peers(data: object, group_rounds: int, rounds: int = 60, absence: float = ABSENCE) -> float:
    """Accuracy of single peers at the end, means of 3 seeds."""
    plans = [plan_of(s, rounds, data, group_rounds=group_rounds, absence=absence) for s in SEEDS]
    return mean(times_to(plan, rounds * PHASE_S, of="each").accuracy for plan in plans)


def rounds_alone(data: object, absence: float, groupings: Any = EVERYBODY, rounds: int = 60) -> float:
    """The same in rounds that all begin and end together."""
    ends = {s: [*in_rounds(s, absence, data, rounds, groupings)][-1] for s in SEEDS}
    return mean(accuracy(s, data, models, "each") for s, models in ends.items())


def test_single_peers_end_within_a_point_of_local_sgd_without_failures():
    """0.940 against 0.944."""
    assert single_peers("iid", 1) >= rounds_alone("iid", 0.0) - 0.01


def test_few_labels_per_peer_need_more_group_rounds():
    """Two label shards per peer, 160 rounds: 0.957 by exact averaging while nobody is absent, 0.949 with two
    group rounds and absences, 0.913 with one."""
    exact = rounds_alone(SHARDS, 0.0, rounds=160)
    one, two = single_peers(SHARDS, 1, 160), single_peers(SHARDS, 2, 160)
    assert exact - 0.06 <= one <= exact - 0.02
    assert two >= exact - 0.01


def test_before_the_end_absences_alone_cost_more_than_the_grid():
    """After 60 rounds 0.87 with two group rounds. With the same absences 0.88 on a perfect grid and 0.88 with
    exact averaging, without them 0.93: who is absent in the last round has trained on two labels."""
    two = single_peers(SHARDS, 2)
    assert two >= rounds_alone(SHARDS, ABSENCE, GRID) - 0.02
    assert rounds_alone(SHARDS, ABSENCE) <= rounds_alone(SHARDS, 0.0) - 0.03


def test_while_nobody_is_absent_two_group_rounds_are_exact_averaging():
    """Two label shards per peer: both 0.931."""
    assert single_peers(SHARDS, 2, absence=0.0) >= rounds_alone(SHARDS, 0.0) - 0.01
