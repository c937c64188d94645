"""FedAvg: identities with SGD, its rounds, and who is waited for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from methods_reference import INSTANT, batches, gradient, rate, run, sgd, start, union, with_programs
from small import run_small, small_plan
from toy import Watcher

from edgefl.errors import Stuck
from edgefl.learning.cost import duration_s
from edgefl.learning.work import LocalSGD
from edgefl.methods.federated.fedavg import FedAvgConfig, GlobalModel, LocalModel, Mean
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.parameters import Layout, Vector
from edgefl.patterns.rounds import cohort

WHOLE = {"batch_size": 2000, "local_steps": None, "local_epochs": 1}


def test_one_client_is_plain_sgd_bit_for_bit():
    plan = small_plan("fedavg", 1, rounds=5, train={"local_steps": 3})
    assert torch.equal(run(plan).results[0].values, sgd(plan, batches(plan, 1, range(15))))


def test_one_client_and_one_step_a_round_is_plain_sgd():
    plan = small_plan("fedavg", 1, rounds=12, train={"local_steps": 1})
    x = run(plan).results[0].values
    assert torch.allclose(x, sgd(plan, batches(plan, 1, range(12))), rtol=0, atol=1e-6)


def test_whole_shares_and_one_epoch_is_gradient_descent_on_the_weighted_mean():
    plan = small_plan("fedavg", 4, rounds=3, train=WHOLE, data={"name": "dirichlet", "alpha": 0.5})
    sizes = [len(spec.data) for spec in plan.nodes[1:]]
    assert len(set(sizes)) > 1
    x = start(plan)
    for t in range(3):
        gradients = [gradient(plan, x, batches(plan, k, [t])[0]) for k in range(1, 5)]
        x = x - rate(plan) * sum(n * g for n, g in zip(sizes, gradients, strict=True)) / sum(sizes)
    assert torch.allclose(run(plan).results[0].values, x, rtol=1e-5, atol=1e-6)


def test_equal_batches_and_one_step_is_sgd_with_the_large_batch():
    plan = small_plan("fedavg", 5, rounds=6, train={"local_steps": 1}, equal_shares=True)
    large = [union(batches(plan, k, [t])[0] for k in range(1, 6)) for t in range(6)]
    assert torch.allclose(run(plan).results[0].values, sgd(plan, large), rtol=0, atol=1e-5)


def test_uniform_weights_ignore_the_sizes():
    plan = small_plan("fedavg", 3, rounds=1, train=WHOLE, data="quantity", weighting="uniform")
    locals_ = [sgd(plan, batches(plan, k, [0])) for k in range(1, 4)]
    assert torch.allclose(run(plan).results[0].values, sum(locals_) / 3, rtol=0, atol=1e-6)


def test_a_round_costs_the_model_down_and_up_for_each_of_the_cohort():
    watcher = Watcher()
    outcome = run_small("fedavg", 10, rounds=4, client_fraction=0.3, watcher=watcher)
    d = outcome.results[0].layout.size
    assert outcome.traffic.payload_bytes == 4 * 3 * 2 * 4 * d
    assert [m["reports"] for _, _, m in watcher.metrics] == [3] * 4


def test_cohorts_are_uniform_without_replacement():
    ids = range(1, 11)
    drawn = [cohort(np.random.default_rng(k), ids, 3) for k in range(2000)]
    assert all(len(set(c)) == 3 and c == sorted(c) for c in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=11)[1:]
    assert counts.sum() == 6000 and abs(counts / 2000 - 0.3).max() < 0.04  # four standard errors
    assert cohort(np.random.default_rng(0), ids, 10) == list(ids)


async def exponential_client(node):
    """Reports after an exponential time of mean 1 s, and starts anew when a newer model comes."""
    m = await node.receive(GlobalModel)
    while True:
        newer = await node.receive(GlobalModel, timeout_s=float(node.rng("time", m.round).exponential()))
        if newer is None:
            node.send(m.sender, LocalModel(m.round, m.parameters, 1, 1, 0.0))
            newer = await node.receive(GlobalModel)
        m = newer


@pytest.mark.parametrize(
    ("num_clients", "over_selection", "expected_s"),
    [(10, 0.0, 2.929), (13, 0.3, 1.347)],
    ids=["10 of 10", "10 of 13"],
)
def test_round_times_follow_order_statistics(num_clients, over_selection, expected_s):
    """The largest of 10 exponential times has mean H_10; the 10th of 13 has mean H_13 - H_3."""
    rounds = 1500
    plan = small_plan(
        "fedavg", num_clients, rounds=rounds, access=INSTANT, model={"name": "linear"},
        client_fraction=10 / num_clients, over_selection=over_selection,
    )  # fmt: skip
    outcome = run(with_programs(plan, client=exponential_client))
    assert outcome.time_s / rounds == pytest.approx(expected_s, rel=0.05)
    assert outcome.traffic.table[0, 1, "GlobalModel"][0] == rounds


def test_a_late_report_is_dropped_and_counted_and_the_others_are_averaged():
    """A report that took a step to make is 1.5 steps on its way when the round closes after 2."""
    step_s = _step_s(small_plan("fedavg", 3, train={"local_steps": 1}, equal_shares=True))
    far = INSTANT.model_copy(update={"latency_s": 0.75 * step_s})
    plan = small_plan(
        "fedavg", 3, rounds=3, train={"local_steps": 1}, access=[INSTANT, INSTANT, INSTANT, far],
        equal_shares=True, round_deadline_s=2 * step_s,
    )  # fmt: skip
    watcher = Watcher()
    outcome = run(plan, watcher)
    assert outcome.time_s == pytest.approx(3 * 2 * step_s)
    assert [m["missing"] for _, _, m in watcher.metrics] == [1, 1, 1]
    assert outcome.stale == {"LocalModel": 2}
    large = [union(batches(plan, k, [t])[0] for k in (1, 2)) for t in range(3)]
    assert torch.allclose(outcome.results[0].values, sgd(plan, large), rtol=0, atol=1e-5)


SHARED = ["fedavg", "fedprox", "fedadam", "fednova", "median", "scaffold", "fjord", "fixed-adacomm"]


@pytest.mark.parametrize("method", SHARED)
def test_work_for_a_closed_round_is_left_before_the_next_model_comes(method):
    """The slow client needs 2.5 local phases; each deadline finds it at work, each model free."""
    config = {"fixed-adacomm": {"period_steps": 2}, "fjord": {"widths": (1.0,)}}.get(method, {})
    quick = run(small_plan(method, 3, rounds=1, access=INSTANT, equal_shares=True, **config)).time_s
    plan = small_plan(
        method, 3, rounds=4, slowdowns=[1, 1, 1, 2.5], access=INSTANT, equal_shares=True,
        round_deadline_s=2 * quick, **config,
    )  # fmt: skip
    watcher = Watcher()
    outcome = run(plan, watcher)
    assert outcome.time_s == pytest.approx(4 * 2 * quick, rel=1e-6)
    assert outcome.traffic.table[0, 3, "Stop"][0] == 4 and (0, 1, "Stop") not in outcome.traffic.table
    assert not any(sender == 3 for sender, *_ in outcome.traffic.table) and not outcome.stale
    assert outcome.busy_s[3] == pytest.approx(outcome.time_s, rel=1e-6)


def test_without_a_deadline_nobody_is_told_to_stop():
    outcome = run(small_plan("fedavg", 3, rounds=2, slowdowns=[1, 1, 1, 2.5]))
    assert not any(kind == "Stop" for *_, kind in outcome.traffic.table)


def test_too_few_reports_make_a_round_void():
    plan = small_plan("fedavg", 2, rounds=3, min_reports=2, faults=FaultPlan(crashes=(Crash(1, 0.0),)))
    watcher = Watcher()
    assert torch.equal(run(plan, watcher).results[0].values, start(plan))
    assert [m["reports"] for _, _, m in watcher.metrics] == [1, 1, 1]


def test_a_slow_device_delays_each_round_by_what_it_costs():
    fast = small_plan("fedavg", 4, rounds=3, access=INSTANT)
    slow = small_plan("fedavg", 4, rounds=3, access=INSTANT, slowdowns=[1, 1, 1, 1, 10])
    step_s = _step_s(fast)
    assert run(fast).time_s == pytest.approx(3 * step_s, rel=1e-4)
    assert run(slow).time_s == pytest.approx(3 * 10 * step_s, rel=1e-4)


def _step_s(plan):
    """Seconds that a round of local training takes client 1."""
    spec = plan.nodes[1]
    work = LocalSGD(plan.learner.model.init(), spec.data, 0, spec.workload)
    return duration_s(work.cost(plan.learner), spec.profile)


def test_a_client_that_returns_takes_part_again():
    faults = FaultPlan(crashes=(Crash(2, at_s=0.001, down_s=0.01),), detect_s=0.001)
    watcher = Watcher()
    outcome = run_small("fedavg", 3, rounds=20, faults=faults, watcher=watcher)
    reports = [m["reports"] for _, _, m in watcher.metrics]
    assert outcome.status == "finished" and set(reports) == {2, 3} and reports[-1] == 3


def test_with_nobody_left_the_server_waits_for_a_return():
    crashes = (Crash(1, at_s=0.001, down_s=5.0), Crash(2, at_s=0.001, down_s=7.0))
    outcome = run_small("fedavg", 2, rounds=40, faults=FaultPlan(crashes=crashes, detect_s=0.1))
    assert outcome.status == "finished" and 5.0 < outcome.time_s < 6.0


def test_with_nobody_left_for_good_the_run_says_so():
    faults = FaultPlan(crashes=(Crash(1, at_s=0.001), Crash(2, at_s=0.001)), detect_s=0.1)
    with pytest.raises(Stuck, match=r"server 0 \(toy\) waits for Back"):
        run_small("fedavg", 2, rounds=None, time_s=60.0, faults=faults)


def test_over_selection_stops_the_rest_whose_work_is_charged_until_then():
    """Three of four are wanted; the slow one is told to stop each round and never reports late."""
    config = {"slowdowns": [1, 1, 1, 1, 50], "access": INSTANT, "rounds": 3}
    plan = small_plan("fedavg", 4, client_fraction=0.75, over_selection=0.3, **config)
    watcher = Watcher()
    outcome = run(plan, watcher)
    assert [m["reports"] for _, _, m in watcher.metrics] == [3] * 3
    assert [m["late"] for _, _, m in watcher.metrics] == [1] * 3
    assert outcome.traffic.table[0, 4, "Stop"][0] == 3 and (4, 0, "LocalModel") not in outcome.traffic.table
    assert outcome.busy_s[4] == pytest.approx(outcome.time_s, rel=1e-6)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_server_rate_goes_part_of_the_way(weighting):
    whole, half = (
        run(small_plan("fedavg", 3, rounds=1, data="quantity", weighting=weighting, server_rate=r)).results[0]
        for r in (1.0, 0.5)
    )
    x = start(small_plan("fedavg", 3))
    assert torch.allclose(half.values - x, (whole.values - x) / 2, rtol=1e-5, atol=1e-7)


def test_the_mean_over_cohorts_is_biased_and_the_unbiased_weights_are_not():
    """n = 10, 20, 30, 40, values 1, 2, 3, 7, two of four: 3.864 against 4.2."""
    layout = Layout.of_shapes([("value", (1,))])
    sizes, values = {1: 10, 2: 20, 3: 30, 4: 40}, {1: 1.0, 2: 2.0, 3: 3.0, 4: 7.0}

    class Stub:
        def __init__(self, weighting):
            self.config, self.fleet = FedAvgConfig(weighting=weighting), self

        def ids(self, role):
            return tuple(sizes)

        def num_examples(self, k):
            return sizes[k]

    def vector(value):
        return Vector(layout, torch.tensor([value]))

    def expected(weighting):
        found = []
        for pair in itertools.combinations(sizes, 2):
            mean = Mean(Stub(weighting), vector(0.0), None)
            for k in pair:
                mean.add(LocalModel(0, vector(values[k]), sizes[k], 1, 0.0), vector(values[k]))
            found.append(float(mean.value()[0].values))
        return sum(found) / len(found)

    assert expected("samples") == pytest.approx(3.864, abs=5e-4)
    assert expected("unbiased") == pytest.approx(4.2, rel=1e-6)
