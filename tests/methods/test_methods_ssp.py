"""SSP and BSP: who may begin a clock, what a read holds, and synchronous SGD in the limit."""

from __future__ import annotations

import pytest
import torch
from methods_reference import INSTANT, batches, gradient, rate, run, sgd, start, union
from small import run_small, small_plan
from toy import Watcher

from edgefl.nodes.plan import Crash, FaultPlan

ONE = {"local_steps": 1}
SPEEDS = [1, 1.0, 1.7, 4.3]


def plan_of(method, rounds=6, **config):
    return small_plan(
        method, 3, rounds=rounds, train=ONE, slowdowns=SPEEDS, access=INSTANT, equal_shares=True, **config
    )


def metric(watcher, name):
    return [m[name] for _, _, m in watcher.metrics if name in m]


def test_bsp_with_one_step_is_synchronous_sgd_at_any_speeds():
    plan = plan_of("bsp")
    large = [union(batches(plan, k, [t])[0] for k in (1, 2, 3)) for t in range(6)]
    assert torch.allclose(run(plan).results[0].values, sgd(plan, large), rtol=0, atol=1e-5)


def test_in_full_changes_add_up():
    plan = plan_of("bsp", rounds=2, scale="sum")
    x = start(plan)
    for t in range(2):
        x = x - rate(plan) * sum(gradient(plan, x, batches(plan, k, [t])[0]) for k in (1, 2, 3))
    assert torch.allclose(run(plan).results[0].values, x, rtol=0, atol=1e-5)


def test_ssp_with_bound_0_and_complete_reads_is_bsp_bit_for_bit_and_with_newest_reads_is_not():
    bsp = run(plan_of("bsp")).results[0]
    complete = run(plan_of("ssp", max_ahead=0, reads="complete")).results[0]
    newest = run(plan_of("ssp", max_ahead=0, reads="newest")).results[0]
    assert complete.equal(bsp)
    assert torch.allclose(newest.values, bsp.values, rtol=0, atol=1e-5)  # all are served when the last is in


def test_newest_reads_let_a_late_reader_see_changes_of_its_own_clock():
    """With unequal links the model leaves for all at once, but two reads of one clock differ in SSP."""
    reads = {}
    for kind in ("newest", "complete"):
        watcher = Watcher()
        plan = plan_of("ssp", rounds=12, max_ahead=1, reads=kind)
        reads[kind] = run(plan, watcher).results[0]
    assert not reads["newest"].equal(reads["complete"])


@pytest.mark.parametrize("s", [0, 1, 3])
@pytest.mark.parametrize("reads", ["newest", "complete"])
def test_clocks_differ_by_s_at_a_start_and_s_plus_1_at_an_end(s, reads):
    watcher = Watcher()
    run(plan_of("ssp", rounds=20, max_ahead=s, reads=reads), watcher)
    assert max(metric(watcher, "ahead")) == s
    assert max(metric(watcher, "completed_ahead")) == s + 1


def test_without_a_bound_nobody_waits():
    watcher = Watcher()
    run(plan_of("ssp", rounds=12, max_ahead=12), watcher)
    assert max(metric(watcher, "blocked_s")) == 0


def test_the_slowest_sets_the_pace_after_s_clocks():
    bound, free = (run(plan_of("ssp", rounds=30, max_ahead=s)).time_s for s in (2, 30))
    assert bound == pytest.approx(free, rel=1e-6)  # the end is the slowest one's, either way
    watcher = Watcher()
    run(plan_of("ssp", rounds=30, max_ahead=2), watcher)
    assert max(metric(watcher, "blocked_s")) > 0


@pytest.mark.parametrize("method", ["bsp", "ssp"])
def test_one_client_is_sgd(method):
    plan = small_plan(method, 1, rounds=8, train=ONE)
    x = run(plan).results[0].values
    assert torch.allclose(x, sgd(plan, batches(plan, 1, range(8))), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["bsp", "ssp"])
def test_a_clock_costs_the_model_down_and_a_change_up(method):
    outcome = run_small(method, 3, rounds=4)
    d = outcome.results[0].layout.size
    assert outcome.traffic.payload_bytes == 4 * 3 * 2 * 4 * d


@pytest.mark.parametrize("method", ["bsp", "ssp"])
def test_one_that_is_gone_leaves_the_minimum_and_one_that_returns_enters_at_it(method):
    clock_s = run_small(method, 3, rounds=1).time_s
    for down_s in (None, 5 * clock_s):
        watcher = Watcher()
        faults = FaultPlan(crashes=(Crash(2, at_s=2.5 * clock_s, down_s=down_s),), detect_s=clock_s / 50)
        outcome = run_small(method, 3, rounds=20, faults=faults, watcher=watcher)
        assert outcome.status == "finished" and outcome.time_s < 23 * clock_s
        seen = outcome.traffic.table[0, 2, "View"][0]
        assert seen == 3 if down_s is None else 10 < seen < 20


@pytest.mark.parametrize("method", ["bsp", "ssp"])
def test_a_server_that_returns_gives_everybody_the_model_anew(method):
    clock_s = run_small(method, 3, rounds=1).time_s
    faults = FaultPlan(crashes=(Crash(0, at_s=4.5 * clock_s, down_s=clock_s / 10),), detect_s=clock_s / 50)
    watcher = Watcher()
    outcome = run_small(method, 3, rounds=10, faults=faults, watcher=watcher)
    assert outcome.status == "finished"
    assert [step for _, _, step, _ in watcher.models] == list(range(1, 11))
