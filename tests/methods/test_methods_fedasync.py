"""FedAsync: staleness, its discounts, and chains of work that nobody waits for."""

from __future__ import annotations

import pytest
import torch
from methods_reference import INSTANT, Recording, batches, run, sgd, start
from small import run_small, small_plan
from toy import Watcher

from edgefl.learning.cost import duration_s
from edgefl.learning.work import LocalSGD
from edgefl.methods.federated.fedasync import FedAsyncConfig
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.patterns.asynchronous import discount

PLAIN = {"mixing_weight": 1.0, "staleness": "constant", "proximal_rho": 0.0}


def staleness(watcher):
    return [int(m["staleness"]) for _, _, m in watcher.metrics if "staleness" in m]


def test_one_client_taken_in_full_is_plain_sgd_bit_for_bit():
    plan = small_plan("fedasync", 1, rounds=6, train={"local_steps": 3}, **PLAIN)
    assert torch.equal(run(plan).results[0].values, sgd(plan, batches(plan, 1, range(18))))


def test_taken_in_full_the_model_is_the_last_arrival():
    plan = small_plan("fedasync", 4, rounds=3, slowdowns=[1, 1, 1.3, 1.7, 2.9], **PLAIN)
    recording, watcher = Recording(plan.learner), Watcher()
    run(plan, watcher, recording)
    arrivals = recording.trained
    assert len(watcher.models) == 12
    for (_, _, _, x), y in zip(watcher.models, arrivals, strict=False):
        assert x.equal(y)


def test_each_arrival_moves_the_model_by_its_discounted_weight():
    plan = small_plan("fedasync", 3, rounds=4, slowdowns=[1, 1, 1.3, 2.9], mixing_weight=0.5)
    recording, watcher = Recording(plan.learner), Watcher()
    run(plan, watcher, recording)
    x = start(plan)
    for (_, _, _, found), y, u in zip(watcher.models, recording.trained, staleness(watcher), strict=False):
        alpha = 0.5 * (1 + u) ** -0.5
        x = (1 - alpha) * x + alpha * y.values
        assert torch.allclose(found.values, x, rtol=0, atol=1e-6)


def test_discounts():
    polynomial, constant = FedAsyncConfig(), FedAsyncConfig(staleness="constant")
    hinge = FedAsyncConfig(staleness="hinge", staleness_a=3.0, staleness_b=2)
    assert [discount(c, 0) for c in (polynomial, constant, hinge)] == [1.0, 1.0, 1.0]
    assert discount(polynomial, 3) == 0.5 and discount(constant, 99) == 1.0
    assert [discount(hinge, u) for u in (1, 2, 3, 4)] == [1.0, 1.0, 1 / 4, 1 / 7]


def test_staleness_counts_the_versions_from_download_to_merge():
    watcher = Watcher()
    run_small("fedasync", 4, rounds=5, watcher=watcher)
    assert staleness(watcher) == [0, 1, 2, 3] + [3] * 16


def test_concurrency_bounds_the_clients_at_work():
    watcher = Watcher()
    run_small("fedasync", 5, rounds=4, concurrency=1, watcher=watcher)
    assert staleness(watcher) == [0] * 20
    senders = {node for node, kind, *_ in watcher.spans if kind == "compute"}
    assert senders == {1, 2, 3, 4, 5}


def test_too_stale_an_update_is_dropped_and_its_sender_goes_on():
    watcher = Watcher()
    outcome = run_small("fedasync", 3, rounds=8, slowdowns=[1, 1, 1, 5], max_staleness=4, watcher=watcher)
    dropped = [m for _, _, m in watcher.metrics if "dropped" in m]
    merged = [m for _, _, m in watcher.metrics if "dropped" not in m]
    assert outcome.status == "finished" and len(merged) == 24
    assert dropped and all(m["staleness"] > 4 for m in dropped) and all(m["staleness"] <= 4 for m in merged)
    assert outcome.traffic.table[0, 3, "GlobalModel"][0] == 1 + len(dropped)


def test_a_slow_device_hardly_delays_anybody():
    rounds, n = 20, 4
    plan = small_plan("fedasync", n, rounds=rounds, access=INSTANT, slowdowns=[1, 1, 1, 1, 10])
    spec = plan.nodes[1]
    work = LocalSGD(plan.learner.model.init(), spec.data, 0, spec.workload)
    step_s = duration_s(work.cost(plan.learner), spec.profile)
    alone = run(plan).time_s
    assert alone == pytest.approx(rounds * n / (n - 1 + 0.1) * step_s, rel=0.05)
    assert alone < 0.15 * 10 * rounds * step_s  # what synchronous rounds would take


def test_a_return_does_not_double_a_clients_chain():
    """The client crashes with a model on its way to it, and returns before that arrives."""
    step_s = run_small("fedasync", 2, rounds=1).time_s
    crash = Crash(1, at_s=step_s * 1.01, down_s=step_s * 1e-3)
    watcher = Watcher()
    faults = FaultPlan(crashes=(crash,), detect_s=10.0)
    outcome = run_small("fedasync", 2, rounds=30, faults=faults, watcher=watcher)
    assert outcome.status == "finished"
    assert staleness(watcher)[4:24] == [1] * 20


@pytest.mark.parametrize("at_share", [0.2, 0.4, 0.6, 0.8])
def test_a_server_that_returns_takes_versions_that_it_lost_as_fresh(at_share):
    """It goes on from the end of the last saved round; updates of later versions are still on their way."""
    five_s = run_small("fedasync", 8, rounds=5).time_s
    faults = FaultPlan(crashes=(Crash(0, at_s=at_share * five_s, down_s=1e-6),), detect_s=10.0)
    watcher = Watcher()
    outcome = run_small("fedasync", 8, rounds=12, faults=faults, watcher=watcher)
    assert outcome.status == "finished" and min(staleness(watcher)) == 0
    assert staleness(watcher)[64:88] == [7] * 24  # each has one chain again
