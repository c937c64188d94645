"""Synchronous SGD over a ring: large-batch SGD, bit-equal at all peers."""

from __future__ import annotations

import pytest
import torch
from methods_reference import batches, run, sgd, union
from small import small_plan

from edgefl.nodes.plan import Crash, FaultPlan


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_it_is_sgd_with_the_large_batch(n):
    plan = small_plan("ring-allreduce", n, rounds=6, equal_shares=True)
    outcome = run(plan)
    large = sgd(plan, [union(batches(plan, i, [k])[0] for i in range(n)) for k in range(6)])
    assert all(outcome.results[i].equal(outcome.results[0]) for i in range(n))
    assert torch.allclose(outcome.results[0].values, large, rtol=0, atol=1e-5)


def test_one_peer_is_sgd_bit_for_bit_and_sends_nothing():
    plan = small_plan("ring-allreduce", 1, rounds=6)
    outcome = run(plan)
    assert torch.equal(outcome.results[0].values, sgd(plan, batches(plan, 0, range(6))))
    assert outcome.traffic.messages == 0


def test_momentum_stays_in_step():
    plan = small_plan("ring-allreduce", 3, rounds=6, train={"momentum": 0.9})
    outcome = run(plan)
    assert all(outcome.results[i].equal(outcome.results[0]) for i in range(3))


def test_a_gradient_costs_two_models_less_a_share():
    n, rounds = 4, 3
    plan = small_plan("ring-allreduce", n, rounds=rounds)
    d = plan.learner.model.layout.size  # nothing but the gradient travels
    assert run(plan).traffic.payload_bytes == rounds * 8 * (n - 1) * d


def test_a_lost_peer_is_left_out_and_the_others_go_on_bit_equal():
    """Wherever it goes: the steps from some step on are those of the survivors' batches alone."""
    undisturbed = run(small_plan("ring-allreduce", 4, rounds=6))
    for at in range(1, 20):
        crash = Crash(2, at_s=undisturbed.time_s * at / 20)
        plan = small_plan("ring-allreduce", 4, rounds=6, faults=FaultPlan(crashes=(crash,), detect_s=1e-5))
        results = run(plan).results
        assert set(results) == {0, 1, 3} and len({x.values.numpy().tobytes() for x in results.values()}) == 1
        assert any(
            torch.allclose(results[0].values, without_from(plan, 2, first), rtol=0, atol=1e-5)
            for first in range(7)
        )


def without_from(plan, lost, first):
    """Six steps on the mean gradient of four peers, and of three from step `first` on."""
    members = [[i for i in range(4) if i != lost or k < first] for k in range(6)]
    return sgd(plan, [union(batches(plan, i, [k])[0] for i in members[k]) for k in range(6)])


def test_the_last_that_lives_goes_on_alone():
    crashes = tuple(Crash(i, at_s=0.001 * i) for i in (1, 2))
    plan = small_plan("ring-allreduce", 3, rounds=6, faults=FaultPlan(crashes=crashes, detect_s=1e-4))
    assert set(run(plan).results) == {0}
