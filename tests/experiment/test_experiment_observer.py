"""Figures that can be worked by hand: energy, spread, and joining what several processes saw."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from experiment_files import small_file

from edgefl.devices import DeviceProfile
from edgefl.experiment.build import Built, build
from edgefl.experiment.config import load_experiment
from edgefl.experiment.energy import node_joules, total
from edgefl.experiment.observer import RunObserver, spread
from edgefl.nodes.traffic import Traffic
from edgefl.runtimes.outcome import Outcome


def built(folder: Path, method: str, *overrides: str) -> Built:
    return build(load_experiment(small_file(folder), overrides, method=method))


def test_joules_by_hand() -> None:
    profile = DeviceProfile(
        name="x",
        compute_flops=1,
        memory_bytes_per_s=1,
        memory_bytes=1,
        idle_w=2,
        busy_w=7,
        radio_j_per_byte=0.5,
    )
    assert node_joules(profile, time_s=10, busy_s=4, num_bytes=6) == 2 * 10 + 5 * 4 + 0.5 * 6
    two_lanes = profile.model_copy(update={"lanes": 2})
    assert node_joules(two_lanes, time_s=10, busy_s=8, num_bytes=0) == 2 * 10 + 5 * 4
    dark = profile.model_copy(update={"idle_w": None})
    assert node_joules(dark, 1, 1, 1) is None
    assert total([None, 3.0, 4.0]) == 7.0
    assert total([None]) is None


def test_the_worst_tenth_is_of_the_worse_end() -> None:
    values = [i / 20 for i in range(20)]
    assert spread(values, "accuracy") == pytest.approx((0.025, 0.475, 0.95))
    assert spread(values, "loss") == pytest.approx((0.925, 0.475, 0.0))


def test_every_so_many_rounds_of_each_node(tmp_path: Path) -> None:
    """A row once as many multiples of every_rounds have been published as there are nodes."""
    run = built(tmp_path, "d-psgd", "evaluate.every_rounds=2")
    observer = RunObserver(run)
    observer.begin(Traffic())
    model = run.learner.model.init()
    for time_s, step in ((1.0, 1), (2.0, 2)):
        for node in range(4):
            observer.published(node, time_s + node / 10, step, model * (1 + node), None)
            observer.published(node, time_s + node / 10, step, model * (1 + node), None)  # counts once
    assert [row[0] for row in observer.curve] == [0.0, 2.3]
    assert [row[1] for row in observer.evaluations if row[0] == 2.3] == [0, 1, 2, 3]


def test_parts_of_a_model_that_are_cut_anew(tmp_path: Path) -> None:
    """A row when the last part has reached a step, and once for each; the newest part counts for a block."""
    run = built(tmp_path, "dapple")
    observer = RunObserver(run)
    observer.begin(Traffic())
    model, last = run.learner.model, len(run.learner.model.blocks)

    def publishes(time_s: float, step: int, first: int, end: int) -> None:
        part = model.cut(model.init() * (1.0 + time_s), first, end)
        observer.published(first, time_s, step, part, f"{first}:{end}")

    for step in (0, 1, 2):
        publishes(step, step, 0, 1)
        publishes(step + 0.5, step, 1, last)
    publishes(3.0, 2, 0, last)  # one device for all, that goes on after step 2
    publishes(4.0, 3, 0, last)
    publishes(5.0, 3, 0, 1)  # and two again
    publishes(5.5, 3, 1, last)
    publishes(6.0, 4, 0, 1)
    publishes(6.5, 4, 1, last)
    assert [(row[0], row[1]) for row in observer.curve] == [(0.0, 0), (1.5, 1), (2.5, 2), (4.0, 3), (6.5, 4)]
    joint = observer.joint_model()
    assert joint is not None
    expected = model.join(model.cut(model.init() * 7.0, 0, 1), model.cut(model.init() * 7.5, 1, last))
    assert joint.equal(expected)


def test_at_the_end_the_newest_parts_of_all_processes_count(tmp_path: Path) -> None:
    """Node 1 was lost after step 1; since then node 0 has the whole model."""
    run = built(tmp_path, "dapple")
    model, last = run.learner.model, len(run.learner.model.blocks)
    observer = RunObserver(run, hosted=[0])
    observer.begin(Traffic())
    observer.published(0, 1.0, 1, model.cut(model.init(), 0, 1), "0:1")
    observer.published(0, 2.0, 2, model.init() * 2.0, f"0:{last}")
    lost = model.cut(model.init(), 1, last)
    outcome = Outcome(
        status="finished", reason="", time_s=3.0, results={}, traffic=Traffic(), busy_s={}, stale={},
        dropped={}, num_events=0, last_models={1: (1.0, 1, lost)},
    )  # fmt: skip
    observer.final(outcome)
    joint = observer.joint_model()
    assert joint is not None and joint.equal(model.init() * 2.0)
    assert observer.curve[-1][:2] == (3.0, 2)


def test_the_mean_model_is_what_is_evaluated_and_kept(tmp_path: Path) -> None:
    run = built(tmp_path, "ring-allreduce")
    observer = RunObserver(run)
    observer.begin(Traffic())
    model = run.learner.model.init()
    for node, factor in enumerate((0.0, 1.0, 1.0, 2.0)):
        observer.published(node, 1.0, 1, model * factor, None)
    joint = observer.joint_model()
    assert joint is not None
    torch.testing.assert_close(joint.values, model.values)
    before, after = observer.curve
    assert after[3] == pytest.approx(before[3], rel=1e-5)  # the mean of the four is the initial model
    assert [row[1] for row in observer.evaluations] == [-1, -1]


def test_two_processes_come_to_the_curve_of_one(tmp_path: Path) -> None:
    run = built(tmp_path, "d-psgd", "evaluate.every_s=1.0", "stop.target={value=0.01, stop=false}")
    model = run.learner.model.init()

    def watch(hosted: tuple[int, ...]) -> RunObserver:
        observer, traffic = RunObserver(run, hosted=hosted), Traffic()
        observer.begin(traffic)
        for node in hosted:
            observer.published(node, 0.5, 1, model * (node - 1.0), None)
            traffic.add(node, (node + 1) % 4, "Model", 100 * (node + 1), 101 * (node + 1))
            observer.recorded(node, 0.5, {"train_loss": float(node)})
        observer.tick(1.0)
        return observer

    whole, first, second = watch((0, 1, 2, 3)), watch((0, 1)), watch((2, 3))
    first.merge(second.export())
    for a, b in zip(first.curve, whole.curve, strict=True):
        assert a[:7] == b[:7]
        # each process hears only of the bytes that its own nodes sent
        assert math.isclose(a[7], b[7], rel_tol=0.05)
    assert sorted(first.metrics) == sorted(whole.metrics)
    assert first.time_to_target_s == whole.time_to_target_s


def test_parts_are_joined_by_the_names_of_their_tensors(tmp_path: Path) -> None:
    run = built(tmp_path, "fedavg")
    model = run.learner.model
    initial = model.init()
    front = model.cut(initial * 3.0, 0, 1)
    object.__setattr__(run.plan.method, "evaluates", "parts")
    try:
        observer = RunObserver(run)
        observer.begin(Traffic())
        observer.published(2, 1.0, 1, front, "front")
        joint = observer.joint_model()
    finally:
        object.__setattr__(run.plan.method, "evaluates", "server")
    assert joint is not None
    cut = front.layout.size
    assert torch.equal(joint.values[:cut], initial.values[:cut] * 3)
    assert torch.equal(joint.values[cut:], initial.values[cut:])
