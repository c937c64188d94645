"""FedBuff: FedAsync with a buffer of one, FedAvg when all start together, and what a buffer holds."""

from __future__ import annotations

import pytest
import torch
from methods_reference import INSTANT, Recording, batches, run, sgd, start
from small import run_small, small_plan
from toy import Watcher

from edgefl.nodes.plan import Crash, FaultPlan

SPEEDS = [1, 1, 1.3, 1.7, 2.9]


def staleness(watcher):
    return [int(m["staleness"]) for _, _, m in watcher.metrics if "staleness" in m]


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.49])
def test_a_buffer_of_one_is_fedasync_bit_for_bit_while_no_update_is_stale(alpha):
    """One client at a time: nothing is stale. From 1/2 on lerp rounds another way, to the last bits."""
    common = {"rounds": 3, "slowdowns": SPEEDS, "concurrency": 1}
    buff = run(small_plan("fedbuff", 4, buffer_size=1, server_rate=alpha, **common)).results[0]
    fresh = run(small_plan("fedasync", 4, mixing_weight=alpha, proximal_rho=0.0, **common)).results[0]
    assert buff.equal(fresh)


def test_with_a_larger_rate_it_is_fedasync_to_rounding():
    common = {"rounds": 3, "slowdowns": SPEEDS, "concurrency": 1}
    buff = run(small_plan("fedbuff", 4, buffer_size=1, server_rate=0.8, **common)).results[0]
    fresh = run(small_plan("fedasync", 4, mixing_weight=0.8, proximal_rho=0.0, **common)).results[0]
    assert torch.allclose(buff.values, fresh.values, rtol=0, atol=1e-6)


def test_for_a_stale_update_the_two_differ_by_the_weight_times_the_drift():
    """alpha_t (x_t - x_tau), at the first stale arrival."""
    alpha, common = 0.3, {"rounds": 1, "slowdowns": SPEEDS}
    seen = {}
    for method, config in (
        ("fedbuff", {"buffer_size": 1, "server_rate": alpha}),
        ("fedasync", {"mixing_weight": alpha, "proximal_rho": 0.0}),
    ):
        watcher = Watcher()
        plan = small_plan(method, 4, **common, **config)
        run(plan, watcher)
        seen[method] = [x.values for _, _, _, x in watcher.models], staleness(watcher)
    (buff, u), (fresh, v) = seen["fedbuff"], seen["fedasync"]
    assert u[:2] == v[:2] == [0, 1] and torch.equal(buff[0], fresh[0])
    x_tau, x_t, alpha_t = start(plan), buff[0], alpha * 2**-0.5
    assert torch.allclose(buff[1] - fresh[1], alpha_t * (x_t - x_tau), rtol=1e-3, atol=1e-6)


def test_a_buffer_of_all_who_start_together_is_fedavg_with_uniform_weights():
    plan = small_plan("fedbuff", 4, rounds=1, access=INSTANT, buffer_size=4)
    average = small_plan("fedavg", 4, rounds=1, access=INSTANT, weighting="uniform")
    assert torch.allclose(run(plan).results[0].values, run(average).results[0].values, rtol=0, atol=1e-5)


def test_one_client_is_sgd_to_rounding():
    plan = small_plan("fedbuff", 1, rounds=6, train={"local_steps": 3}, buffer_size=1)
    assert torch.allclose(
        run(plan).results[0].values, sgd(plan, batches(plan, 1, range(18))), rtol=0, atol=1e-5
    )


def test_a_flush_by_hand_with_momentum():
    K, beta, eta = 3, 0.9, 0.7
    plan = small_plan(
        "fedbuff", 4, rounds=3, slowdowns=SPEEDS, buffer_size=K, server_momentum=beta, server_rate=eta
    )  # fmt: skip
    recording, watcher = Recording(plan.learner), Watcher()
    begun = []

    class Begins(Recording):
        def run(self, works):
            begun.extend(w.parameters.values for w in works)
            return super().run(works)

    recording = Begins(plan.learner)
    run(plan, watcher, recording)
    changes = [y.values - x for x, y in zip(begun, recording.trained, strict=True)]
    factors = [(1 + u) ** -0.5 for u in staleness(watcher)]
    x, v = start(plan), 0.0
    for flush, (_, _, step, found) in enumerate(watcher.models):
        mean = sum(factors[i] * changes[i] for i in range(flush * K, flush * K + K)) / K
        v = beta * v + mean
        x = x + eta * v
        assert step == flush + 1 and torch.allclose(found.values, x, rtol=0, atol=1e-5)


def test_what_is_in_the_buffer_at_the_end_is_dropped_and_counted():
    watcher = Watcher()
    run_small("fedbuff", 4, rounds=2, buffer_size=3, watcher=watcher)
    assert [m["pending"] for _, _, m in watcher.metrics if "pending" in m] == [2]
    assert [step for _, _, step, _ in watcher.models] == [1, 2]


def test_a_lost_client_is_made_up_for_by_the_others_and_counted():
    two_s = run_small("fedbuff", 4, rounds=2, buffer_size=4).time_s
    watcher = Watcher()
    faults = FaultPlan(crashes=(Crash(2, at_s=two_s * 0.8),), detect_s=two_s / 20)
    outcome = run_small("fedbuff", 4, rounds=10, buffer_size=4, faults=faults, watcher=watcher)
    assert outcome.status == "finished" and len(watcher.models) == 10
    assert [m["lost"] for _, _, m in watcher.metrics if "lost" in m] == [1]
    assert outcome.traffic.table[0, 2, "GlobalModel"][0] < 5


def test_too_stale_updates_are_dropped_and_their_senders_go_on():
    watcher = Watcher()
    outcome = run_small(
        "fedbuff", 4, rounds=12, buffer_size=1, slowdowns=[1, 1, 1, 1, 9], max_staleness=4, watcher=watcher
    )
    dropped = [m for _, _, m in watcher.metrics if "dropped" in m]
    assert dropped and all(m["staleness"] > 4 for m in dropped)
    assert outcome.traffic.table[0, 4, "GlobalModel"][0] == len(dropped) + 1
