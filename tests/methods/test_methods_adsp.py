"""ADSP: nobody waits, all commit equally often, and what the limits of its rate are."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import pytest
import torch
from adsp_lab import PERIOD, lab, run_lab, steps_to
from methods_reference import INSTANT, batches, run, sgd, with_programs
from small import run_small, small_plan
from toy import Watcher

from edgefl.methods.federated.adsp import METHOD, GlobalModel
from edgefl.nodes.plan import Crash, FaultPlan

FREE = {"access": INSTANT}


def metric(watcher, name):
    return [m[name] for _, _, m in watcher.metrics if name in m]


@pytest.mark.parametrize("timer", ["due", "interval"])
def test_one_client_is_plain_sgd_whatever_its_commits(timer):
    plan, _ = lab("adsp", speeds=(1,), commits_per_period=7, rounds=10, timer=timer)
    watcher = Watcher()
    x = run(plan, watcher).results[0].values
    num_steps = int(sum(metric(watcher, "local_steps")))
    assert num_steps > 15
    assert torch.allclose(x, sgd(plan, batches(plan, 1, range(num_steps))), rtol=0, atol=1e-5)


def test_a_commit_a_step_on_equal_devices_is_asynchronous_sgd_bit_for_bit():
    """SSP that never waits, in the same order of events; 1/M is exact for four."""
    plan, _ = lab("adsp", speeds=(1,) * 4, commits_per_period=PERIOD, rounds=40)
    asynchronous, _ = lab("ssp", speeds=(1,) * 4, rounds=40, max_ahead=40)
    assert run(plan).results[0].equal(run(asynchronous).results[0])


@pytest.mark.parametrize("commit", [0.2, 1.0])
@pytest.mark.parametrize("timer", ["due", "interval"])
def test_nobody_idles_except_during_its_own_commits(timer, commit):
    plan, unit = lab("adsp", commit=commit, timer=timer)
    _, watcher = run_lab(plan, most_s=200 * unit)
    spans, commits = defaultdict(list), defaultdict(float)
    for node, kind, start_s, end_s, _ in watcher.spans:
        if kind == "compute" and node:
            spans[node].append((start_s, end_s))
    last = {node: steps[-1][1] for node, steps in spans.items()}
    for node, time_s, metrics in watcher.metrics:
        if "commit_s" in metrics and time_s < last[node]:
            commits[node] += metrics["commit_s"]
    for node, steps in spans.items():
        busy_s, first_s = sum(end_s - start_s for start_s, end_s in steps), steps[0][0]
        assert first_s == pytest.approx(commit * unit / 2, rel=1e-5)  # the first model's way
        assert busy_s == pytest.approx(last[node] - first_s - commits[node], rel=1e-6)
        assert commits[node] > 0


@pytest.mark.parametrize("commit", [0.2, 1.0])
@pytest.mark.parametrize("c", [1, 2, 3, 5, 6])
def test_all_have_committed_equally_often_at_check_points(c, commit):
    plan, unit = lab("adsp", commit=commit, commits_per_period=c)
    _, watcher = run_lab(plan, most_s=600 * unit)
    spreads = metric(watcher, "spread")
    assert len(spreads) >= 19 and max(spreads) <= 1 and max(spreads[1:]) == 0


def spreads(**config):
    plan, unit = lab("adsp", commit=0.2, **config)
    return metric(run_lab(plan, most_s=600 * unit)[1], "spread")


def test_above_the_limit_slow_clients_fall_behind_without_end():
    above = spreads(commits_per_period=12)
    assert 60 < above[-1] < 120 and above == sorted(above)


def test_intervals_are_whole_steps_and_what_is_missing_is_made_up_for_in_the_next_period():
    found = spreads(commits_per_period=5, timer="interval")
    assert 1 < max(found) < 6 and min(found[5:]) <= 1


def test_what_is_searched_for_stays_within_the_limit():
    for commit, most in ((0.2, 7), (1.0, 6), (10.0, 2)):
        plan, unit = lab("adsp", commit=commit, search_every_s=1e-9, target_loss=0.3)
        _, watcher = run_lab(plan, most_s=900 * unit)
        wanted = metric(watcher, "commits_wanted")
        assert max(wanted) <= most and len(wanted) > 20
        assert max(metric(watcher, "spread")) <= 1


def test_with_free_communication_it_makes_h_times_the_steps_of_bsp():
    """H = mean speed / least speed: (1 + 1 + 1 + 1/5) / 4 / (1/5) = 4."""
    done = {}
    for method in ("adsp", "bsp"):
        plan, unit = lab(method, speeds=(1, 1, 1, 5))
        _, watcher = run_lab(plan, most_s=300.5 * unit)
        done[method] = sum(kind == "compute" and node > 0 for node, kind, *_ in watcher.spans)
    assert done["bsp"] == pytest.approx(240, abs=4)
    assert done["adsp"] == pytest.approx(4 * done["bsp"], abs=8)


def test_a_commit_costs_a_change_up_and_a_model_down():
    outcome = run_small("adsp", 3, rounds=4)
    d, traffic = outcome.results[0].layout.size, outcome.traffic.table
    up = sum(traffic[k, 0, "Commit"][0] for k in (1, 2, 3))
    assert up == 12
    assert sum(traffic[k, 0, "Commit"][1] for k in (1, 2, 3)) == 4 * d * up
    assert sum(traffic[0, k, "GlobalModel"][1] for k in (1, 2, 3)) == 4 * d * (up + 3)
    assert all(traffic[0, k, "Check"][1] == 0 for k in (1, 2, 3))


def test_momentum_adds_up_at_the_server():
    plan, _ = lab("adsp", speeds=(1,), commits_per_period=PERIOD, rounds=3, server_momentum=0.5)
    watcher = Watcher()
    run(plan, watcher)
    x = [plan.learner.model.init(), *(model for *_, model in watcher.models)]
    v, stream = None, batches(plan, 1, range(3))
    for k in range(3):
        u = sgd(plan, stream[k : k + 1], x[k].values) - x[k].values
        v = u if v is None else 0.5 * v + u
        assert torch.allclose(x[k + 1].values, x[k].values + v, rtol=0, atol=1e-6)


def test_evaluations_hold_no_commit_up():
    """A server to which an evaluation takes longer than a period still answers in the instant."""
    plan, unit = lab("adsp", commit=0.2)
    slow = dataclasses.replace(plan.nodes[0], slowdown=1e4)
    plan = dataclasses.replace(plan, nodes=(slow, *plan.nodes[1:]))
    _, watcher = run_lab(plan, most_s=300 * unit)
    evaluations = [end_s - start_s for _, _, start_s, end_s, work in watcher.spans if work == "Evaluate"]
    assert min(evaluations) > PERIOD * unit
    assert metric(watcher, "commit_s") == pytest.approx(
        [0.2 * unit] * len(metric(watcher, "commit_s")), rel=1e-5
    )


# --- who is gone, and who returns -----------------------------------------------------------------------


def test_one_that_is_gone_leaves_m_and_one_that_returns_commits_as_often_as_the_others():
    plan, unit = lab("adsp", commits_per_period=3, commit=0.2)
    crash = Crash(2, at_s=100 * unit, down_s=200 * unit)
    plan = dataclasses.replace(plan, faults=FaultPlan(crashes=(crash,), detect_s=unit))
    outcome, watcher = run_lab(plan, most_s=600 * unit)
    spreads = metric(watcher, "spread")
    assert outcome.status == "stopped" and max(spreads) <= 3 and spreads[-5:] == [0] * 5
    sent = outcome.traffic.table[2, 0, "Commit"][0]
    always = outcome.traffic.table[1, 0, "Commit"][0]
    assert always == pytest.approx(60, abs=2) and sent == pytest.approx(always - 20, abs=4)


@pytest.mark.parametrize("at", [20, 50, 140])
@pytest.mark.parametrize("node", [0, 3])
def test_it_outlives_a_server_and_a_client_that_return(node, at):
    plan, unit = lab("adsp", commit=0.2, rounds=12)
    faults = FaultPlan(crashes=(Crash(node, at_s=at * unit, down_s=10 * unit),), detect_s=unit / 10)
    outcome = run(dataclasses.replace(plan, faults=faults))
    assert outcome.status == "finished" and torch.isfinite(outcome.results[0].values).all()
    assert all(check.holds(outcome) is True for check in METHOD.invariants)


def test_while_all_are_gone_the_server_waits_for_one_to_return():
    plan, unit = lab("adsp", speeds=(1, 2), rounds=12)
    crashes = tuple(Crash(k, at_s=(40 + k) * unit, down_s=100 * unit) for k in (1, 2))
    watcher = Watcher()
    faults = FaultPlan(crashes=crashes, detect_s=unit / 10)
    outcome = run(dataclasses.replace(plan, faults=faults), watcher)
    assert outcome.status == "finished"
    assert not [time_s for node, time_s, m in watcher.metrics if 45 * unit < time_s < 135 * unit]


def test_a_commit_that_is_no_number_changes_nothing_and_its_sender_goes_on():
    client = METHOD.roles["client"]

    async def lying(node):
        inner = node.send

        def send(to, message):
            if node.id == 1 and message.turn == 1:
                message = dataclasses.replace(message, change=message.change * math.nan, step_s=math.nan)
            return inner(to, message)

        node.send = send
        await client(node)

    watcher = Watcher()
    outcome = run(with_programs(small_plan("adsp", 2, rounds=4), client=lying), watcher)
    refused = [detail for _, kind, _, detail in watcher.events if kind == "refused"]
    assert refused == ["the update of node 1: it is not finite"]
    assert outcome.status == "finished" and torch.isfinite(outcome.results[0].values).all()
    assert outcome.traffic.table[0, 1, GlobalModel.__name__][0] > 3


# --- effects --------------------------------------------------------------------------------------------

SEEDS = (1, 2, 3, 4, 5)
RATES = (1, 2, 3, 5)


def mean_steps_to(target, method, **config):
    return sum(steps_to(method, target, seed=seed, **config)[target] for seed in SEEDS) / len(SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("commit", [0.2, 1.0])
def test_it_reaches_a_loss_in_less_time_than_barriers_and_than_a_commit_a_step(commit):
    adsp = mean_steps_to(0.6, "adsp", commit=commit, target_loss=0.3)
    bsp = mean_steps_to(0.6, "bsp", commit=commit)
    fixed = [
        mean_steps_to(0.6, "bsp", commit=commit, train={"local_steps": tau}) for tau in (5, 10, 40)
    ]  # Fixed AdaComm: a barrier after tau steps of everybody
    asynchronous = mean_steps_to(0.6, "ssp", commit=commit, max_ahead=10**6)
    assert bsp >= 2.5 * adsp and min(fixed) >= 2.5 * adsp
    assert mean_steps_to(0.6, "ssp", commit=commit) >= 2.5 * adsp
    assert asynchronous >= (1.4 if commit == 1.0 else 1.0) * adsp


@pytest.mark.slow
@pytest.mark.parametrize("commit", [0.2, 1.0])
def test_the_search_comes_near_the_best_fixed_rate(commit):
    found = mean_steps_to(0.3, "adsp", commit=commit, target_loss=0.3)
    fixed = [mean_steps_to(0.3, "adsp", commit=commit, commits_per_period=c) for c in RATES]
    assert found <= 1.15 * min(fixed)


@pytest.mark.slow
def test_commits_cost_time_where_they_take_some():
    by_rate = {c: mean_steps_to(0.6, "adsp", commit=1.0, commits_per_period=c) for c in (1, 2, 3, 5, 7, 12)}
    assert max(by_rate[c] for c in (1, 2, 3)) < by_rate[5] < by_rate[7] < by_rate[12]
