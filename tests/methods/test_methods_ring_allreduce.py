"""Synchronous SGD over a ring: large-batch SGD, bit-equal at all peers."""

from __future__ import annotations

import pytest
import torch
from methods_reference import batches, run, sgd, union
from small import small_plan

from edgefl.errors import ProgramFailed
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
    d = plan.learner.model.layout.size + 1  # the weight travels behind the parameters
    assert run(plan).traffic.payload_bytes == rounds * 8 * (n - 1) * d


def test_a_departure_stops_the_run_and_names_the_peer():
    faults = FaultPlan(crashes=(Crash(2, at_s=0.001),), detect_s=0.01)
    with pytest.raises(ProgramFailed, match=r"peer 3 .*PeerGone: node 2 is gone"):
        run(small_plan("ring-allreduce", 4, rounds=50, faults=faults))
