"""Median, trimmed mean, Krum, Multi-Krum: FedAvg in the limit, hostile clients, rounds that are void."""

from __future__ import annotations

import pytest
import torch
from methods_reference import Recording, run, start
from small import small_plan
from toy import Watcher

from edgefl.errors import ConfigError
from edgefl.learning.poison import Poison
from edgefl.nodes.plan import Crash, FaultPlan

METHODS = ["median", "trimmed-mean", "krum", "multi-krum"]


def settings(method, num_hostile):
    return {} if method == "median" else {"num_hostile": num_hostile}


def one_round(method, num_clients=7, **config):
    """The new model after one round, and the models that were trained, in order of id."""
    plan = small_plan(method, num_clients, rounds=1, **config)
    recording = Recording(plan.learner)
    x = run(plan, executor=recording).results[0].values
    return x, torch.stack([y.values for y in recording.trained])


def test_trimming_nothing_is_fedavg_with_uniform_weights():
    x, rows = one_round("trimmed-mean", num_hostile=0)
    assert torch.allclose(x, rows.mean(0), rtol=0, atol=1e-7)


def test_trimming_most_is_the_median():
    x, rows = one_round("trimmed-mean", num_hostile=3)
    y, _ = one_round("median")
    assert torch.equal(x, y) and torch.equal(x, rows.median(0).values)


def test_multi_krum_of_all_is_the_mean():
    x, rows = one_round("multi-krum", num_hostile=2, num_best=7)
    assert torch.allclose(x, rows.mean(0), rtol=0, atol=1e-7)


def test_krum_returns_one_of_the_reports():
    x, rows = one_round("krum", num_hostile=2)
    assert sum(torch.equal(x, row) for row in rows) == 1


def test_with_two_far_away_krum_is_honest_and_multi_krum_the_honest_mean():
    attack = {3: Poison("noise", 50.0), 8: Poison("noise", 50.0)}
    honest = [0, 1, 3, 4, 5, 6, 8]
    plan = small_plan("fedavg", 9, rounds=1)
    recording = Recording(plan.learner)
    run(plan, executor=recording)
    rows = torch.stack([y.values for y in recording.trained])
    plans = {m: small_plan(m, 9, rounds=1, num_hostile=2, poison=attack) for m in ("krum", "multi-krum")}
    x, mean = (run(plan).results[0].values for plan in plans.values())
    assert sum(torch.equal(x, rows[k]) for k in honest) == 1
    assert torch.allclose(mean, rows[honest].mean(0), rtol=0, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_equal_reports_give_that_report(method):
    """With the same data everywhere all report the same."""
    base = small_plan("fedavg", 1)
    part = base.nodes[1].data
    shares = [part] * 7
    plan = small_plan(method, 7, rounds=1, parts=shares, **settings(method, 2))
    single = small_plan("fedavg", 1, rounds=1, parts=[part])
    assert torch.equal(run(plan).results[0].values, run(single).results[0].values)


@pytest.mark.parametrize(
    ("method", "num_hostile", "survivors"), [("krum", 2, 6), ("multi-krum", 2, 6), ("trimmed-mean", 3, 6)]
)
def test_too_few_reports_make_a_round_void(method, num_hostile, survivors):
    faults = FaultPlan(crashes=tuple(Crash(k, at_s=1e-9) for k in range(survivors + 1, 8)), detect_s=1e-9)
    plan = small_plan(method, 7, rounds=2, num_hostile=num_hostile, faults=faults)
    watcher = Watcher()
    assert torch.equal(run(plan, watcher).results[0].values, start(plan))
    assert [m["reports"] for _, _, m in watcher.metrics] == [survivors] * 2


@pytest.mark.parametrize(("method", "needed"), [("krum", 7), ("multi-krum", 7), ("trimmed-mean", 5)])
def test_a_cohort_for_which_every_round_is_void_is_refused(method, needed):
    small_plan(method, needed, num_hostile=2).method.prepare(small_plan(method, needed, num_hostile=2))
    plan = small_plan(method, needed - 1, num_hostile=2)
    with pytest.raises(ConfigError, match=f"at least {needed} reports a round are needed") as caught:
        plan.method.prepare(plan)
    assert caught.value.key == f"method.{method}.num_hostile"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sign-flip", "noise"])
def test_hostile_clients_ruin_the_mean_and_not_the_robust_rules(kind):
    """3 of 10 clients; accuracy on all digits after 30 rounds."""
    attack = {k: Poison(kind, 5.0 if kind == "sign-flip" else 1.0) for k in (2, 5, 9)}
    found = {}
    for method in ("fedavg", *METHODS):
        config = {} if method in ("fedavg", "median") else {"num_hostile": 3}
        plan = small_plan(method, 10, rounds=30, train={"local_steps": 5}, poison=attack, **config)
        batch = plan.nodes[1].data.dataset
        x = run(plan).results[0]
        measured = plan.learner.measure(x, plan.nodes[1].data.take(torch.arange(len(batch.x_train)).numpy()))
        found[method] = measured.correct / measured.num_targets
    assert found["fedavg"] < 0.6 and all(found[m] > 0.8 for m in METHODS), found
