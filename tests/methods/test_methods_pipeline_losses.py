"""Pipelines that lose devices: those who are left go on, and the end is that of an undisturbed run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from split_lab import near, payload, run
from test_methods_dapple import PLANS, SPEEDS, device, model_of, pipeline_plan, planned, unsplit, view
from toy import Watcher, access

from edgefl.errors import Stuck
from edgefl.methods.split.pipeline import Member
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.planning.model_costs import ModelCosts

LINK = access(1e6, latency_s=1e-4)
ADAM = {"batch_size": 32, "local_steps": 2, "optimizer": "adam", "learning_rate": 0.01}
WHEN = (0.0, 0.05, 0.2, 0.33, 0.5, 0.71, 0.93)


def events(watcher: Watcher, *kinds: str) -> list[tuple[str, str]]:
    return [(kind, detail) for _, kind, _, detail in watcher.events if kind in kinds]


def lost_for_good(
    node: int, share: float, method: str = "dapple", **settings: Any
) -> tuple[Any, Any, Watcher]:
    """A run that loses a node after this share of what it takes undisturbed: plan, outcome, what was seen."""
    settings = {"access": LINK, **settings}
    whole = run(pipeline_plan(method, **settings)).time_s
    faults = FaultPlan(crashes=(Crash(node, whole * share),), detect_s=whole / 20)
    plan, watcher = pipeline_plan(method, faults=faults, **settings), Watcher()
    return plan, run(plan, watcher), watcher


@pytest.mark.parametrize("stages", [PLANS[3], PLANS[6]])
@pytest.mark.parametrize("node", [0, 1, 3])
def test_a_lost_stage_stops_the_step_and_all_go_on_as_if_undisturbed(stages, node):
    undisturbed = pipeline_plan(stages=stages, access=access(1e6, latency_s=1e-4))
    outcome = run(undisturbed)
    whole, expected = outcome.time_s, model_of(undisturbed, outcome.results)
    for share in (0.05, 0.2, 0.33, 0.5, 0.71, 0.93, 0.99):
        faults = FaultPlan(crashes=(Crash(node, whole * share, down_s=whole / 3),), detect_s=whole / 20)
        plan = pipeline_plan(stages=stages, access=access(1e6, latency_s=1e-4), faults=faults)
        watcher = Watcher()
        found = run(plan, watcher)
        assert found.status == "finished" and found.time_s > whole
        assert near(model_of(plan, found.results), expected, 1e-6)


def test_a_quick_restart_that_nobody_noticed_and_two_losses_at_once():
    expected = model_of(pipeline_plan(stages=PLANS[3]), run(pipeline_plan(stages=PLANS[3])).results)
    whole = run(pipeline_plan(stages=PLANS[3])).time_s
    quick = (Crash(2, whole * 0.4, down_s=whole * 0.01),)
    both = (Crash(1, whole * 0.5, down_s=whole), Crash(3, whole * 0.55, down_s=whole * 0.2))
    again = (Crash(2, whole * 0.4, down_s=whole * 0.2), Crash(2, whole * 0.62, down_s=whole * 0.2))
    for crashes in (quick, both, again):
        plan = pipeline_plan(stages=PLANS[3], faults=FaultPlan(crashes=crashes, detect_s=whole / 10))
        assert near(model_of(plan, run(plan).results), expected, 1e-6)


def test_a_run_says_that_it_stopped_and_where_it_goes_on():
    whole = run(pipeline_plan(stages=PLANS[3])).time_s
    faults = FaultPlan(crashes=(Crash(2, whole * 0.6, down_s=whole),), detect_s=whole / 10)
    watcher = Watcher()
    run(pipeline_plan(stages=PLANS[3], faults=faults), watcher)
    notes = [
        (kind, detail)
        for _, kind, node, detail in watcher.events
        if node == 0 and kind in ("stopped", "resumed")
    ]
    assert [kind for kind, _ in notes] == ["stopped", "resumed"]
    assert notes[0][1] == "the step is void: peer 2 is gone"
    assert notes[1][1] in ("after 1 steps", "after 2 steps", "after 3 steps")


# --- who is lost for good -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dapple", "gpipe"])
@pytest.mark.parametrize(("stages", "node"), [(PLANS[1], 2), (PLANS[4], 1), (PLANS[6], 1), (PLANS[6], 3)])
def test_the_replicas_that_are_left_take_the_rows_of_a_lost_one(method, stages, node):
    for share in WHEN:
        plan, outcome, watcher = lost_for_good(node, share, method, stages=stages)
        assert outcome.status == "finished"
        assert near(model_of(plan, outcome.results), unsplit(plan), 1e-6)
        (stopped, resumed) = events(watcher, "stopped", "resumed")
        assert stopped[1] == f"the step is void: peer {node} is gone"
        assert f" steps without peer {node}: blocks 0:" in resumed[1]
        assert not events(watcher, "waiting")


@pytest.mark.parametrize("train", [None, ADAM])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("stages", "node"), [(PLANS[3], 1), (PLANS[3], 3), (PLANS[4], 3), (None, 3)])
def test_with_copies_all_go_on_without_a_stages_only_device(stages, node, every, train):
    more = {} if train is None else {"train": train}
    for share in WHEN:
        plan, outcome, watcher = lost_for_good(node, share, stages=stages, copy_every=every, rounds=3, **more)
        assert outcome.status == "finished"
        assert near(model_of(plan, outcome.results), unsplit(plan, 6), 1e-6 if train is None else 1e-5)
        if events(watcher, "resumed"):  # but for the planner's own plan, which needs not all
            assert "planned anew, blocks 0:" in events(watcher, "resumed")[0][1]


@pytest.mark.parametrize("every", [1, 4])
def test_no_more_is_made_anew_than_since_the_last_copy(every):
    """A loss takes back at most copy_every + 2 steps, wherever it falls."""
    train, again = {"batch_size": 32, "local_steps": 10}, []
    for share in (0.3, 0.5, 0.56, 0.61, 0.7, 0.83):
        settings = {"stages": PLANS[3], "copy_every": every, "rounds": 1, "train": train}
        _, _, watcher = lost_for_good(2, share, **settings)
        again.append(sum(node == 1 and "step_s" in m for node, _, m in watcher.metrics) - 10)
    assert 0 < max(again) <= every + 2 and min(again) >= 0


def test_two_devices_that_do_not_keep_each_others_copies_may_both_be_lost():
    """Peer 1's copies are at peer 2, peer 3's too: the last stage's at the one before."""
    settings = {"stages": PLANS[3], "copy_every": 2, "rounds": 4, "access": LINK}
    whole = run(pipeline_plan(**settings)).time_s
    for gap in (0.0, 0.02, 0.3):
        crashes = Crash(1, whole * 0.4), Crash(3, whole * (0.4 + gap))
        plan = pipeline_plan(**settings, faults=FaultPlan(crashes=crashes, detect_s=whole / 50))
        assert near(model_of(plan, run(plan).results), unsplit(plan, 8), 1e-6)


def test_without_a_copy_all_wait_and_say_for_whom():
    with pytest.raises(Stuck, match="peer 0 "):
        lost_for_good(2, 0.6, stages=PLANS[3])
    watcher = Watcher()
    whole = run(pipeline_plan(stages=PLANS[3], access=LINK)).time_s
    faults = FaultPlan(crashes=(Crash(2, whole * 0.6, down_s=whole),), detect_s=whole / 10)
    run(pipeline_plan(stages=PLANS[3], access=LINK, faults=faults), watcher)
    waited = events(watcher, "waiting")
    assert waited == [("waiting", "all wait until peer 2 is back, and nobody else holds blocks 2:3")]


@pytest.mark.parametrize("settings", [{"stages": PLANS[6]}, {"stages": PLANS[3], "copy_every": 1}])
def test_who_comes_back_has_its_old_place_again(settings):
    settings = {"access": LINK, "rounds": 6, **settings}
    whole = run(pipeline_plan(**settings)).time_s
    crash = Crash(2, whole * 0.3, down_s=whole * 0.2)
    plan = pipeline_plan(**settings, faults=FaultPlan(crashes=(crash,), detect_s=whole / 50))
    watcher = Watcher()
    outcome = run(plan, watcher)
    assert near(model_of(plan, outcome.results), unsplit(plan, 12), 1e-6)
    assert outcome.results[2] is not None
    without, again = [detail for _, detail in events(watcher, "resumed")]
    assert " without peer 2: " in without and " without " not in again
    back_s = crash.at_s + whole * 0.2
    assert any(node == 2 and t > back_s and "step_s" in m for node, t, m in watcher.metrics)


def test_who_comes_back_after_the_end_leaves():
    whole = run(pipeline_plan(stages=PLANS[6], access=LINK)).time_s
    faults = FaultPlan(crashes=(Crash(1, whole * 0.5, down_s=20 * whole),), detect_s=whole / 50)
    outcome = run(pipeline_plan(stages=PLANS[6], access=LINK, faults=faults))
    assert outcome.status == "finished" and outcome.results[1] is None
    assert outcome.traffic.table[1, 0, "Leaving"][0] == 1


# --- what it costs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "times"), [(1, 3), (2, 1), (None, 0)])
def test_bytes_of_copies(every, times):
    """After steps 1, 2 and 3 of 4, or after 2: the stages of one device each, with their momentum."""
    plan = pipeline_plan(
        stages=PLANS[4],
        copy_every=every,
        train={"batch_size": 32, "local_steps": 4, "momentum": 0.9},
        rounds=1,
    )
    alone = plan.learner.model.stage(1, 4).counts.parameter_bytes
    assert payload(run(plan).traffic.table, "Copied") == times * 2 * alone


def test_copies_and_versions_that_are_held(monkeypatch):
    """Its own stage's after the last two steps and after the last copy; of its neighbours' the last two."""
    held, state = [], Member.state
    monkeypatch.setattr(
        Member, "state", lambda m: held.append((m.node.id, m.step, sorted(m.held.parts))) or state(m)
    )
    run(pipeline_plan(stages=PLANS[2], copy_every=3, rounds=5))
    last = {node: (step, parts) for node, step, parts in held}
    assert last[0] == (10, [(0, 2, 6), (0, 2, 9), (0, 2, 10), (2, 4, 6), (2, 4, 9)])
    assert max(len(parts) for _, _, parts in held) <= 5


def test_a_loss_on_a_plan_that_memory_allows_no_more_is_waited_for():
    """Three boards that hold the model only together: with copies, but nobody has room for more blocks."""
    free = pipeline_plan(num_devices=3, stages=((2, 1), (3, 1), (4, 1)))
    costs = ModelCosts.of(view(free), free.learner, free.config)
    room = [int(costs.fixed_bytes(a, b, 7) + costs.kept_bytes(a, b, 7)) for a, b in ((0, 2), (2, 3), (3, 4))]
    settings = {"num_devices": 3, "stages": ((2, 1), (3, 1), (4, 1)), "copy_every": 1, "access": LINK}
    settings["profiles"] = [device(f, size) for f, size in zip(SPEEDS[:3], room, strict=True)]
    whole = run(pipeline_plan(**settings)).time_s
    faults = FaultPlan(crashes=(Crash(1, whole * 0.6, down_s=whole),), detect_s=whole / 50)
    plan, watcher = pipeline_plan(**settings, faults=faults), Watcher()
    assert near(model_of(plan, run(plan, watcher).results), unsplit(plan), 1e-6)
    assert len(events(watcher, "waiting")) == 1


# --- any losses ---------------------------------------------------------------------------------------------


def disturbed(seed: int) -> None:
    """One device or two, lost at any time, for good or not; the end is that of one device that trains alone.

    Without copies nobody who alone has a stage is lost for good, with copies one device at the most is.
    """
    rng = np.random.default_rng(seed)
    method, stages = str(rng.choice(["dapple", "gpipe"])), PLANS[int(rng.integers(len(PLANS)))]
    every = [None, 1, 2, 3][int(rng.integers(4))]
    settings = {"stages": stages, "copy_every": every, "access": LINK, "rounds": 3}
    whole = run(pipeline_plan(method, **settings)).time_s
    alone = {0} | {
        s.devices[0] for s in planned(pipeline_plan(method, **settings)).plan.stages if len(s.devices) == 1
    }
    crashes: list[Crash] = []
    for node in rng.permutation(4)[: rng.integers(1, 3)].tolist():
        for_good = node and not crashes and (every is not None or node not in alone)
        down_s = None if for_good else whole * float(rng.choice([0.01, 0.1, 0.3, 1.0]))
        crashes.append(Crash(node, whole * float(rng.uniform(0, 0.98)), down_s))
    faults = FaultPlan(
        crashes=tuple(crashes), detect_s=whole * float(rng.choice([0.001, 0.05, 0.3])), compute_jitter=0.3
    )
    plan = pipeline_plan(method, **settings, faults=faults)
    outcome = run(plan)
    assert outcome.status == "finished", seed
    assert near(model_of(plan, outcome.results), unsplit(plan, 6), 2e-6), seed


@pytest.mark.parametrize("seed", range(10))
def test_any_losses(seed):
    disturbed(seed)


@pytest.mark.slow
def test_any_losses_of_two_hundred_schedules():
    for seed in range(100, 300):
        disturbed(seed)
