"""FedProx: FedAvg at mu = 0 and for one local step; nearer to the round's start the larger mu."""

from __future__ import annotations

import pytest
import torch
from methods_reference import INSTANT, Recording, batches, gradient, rate, run, start
from small import small_plan
from toy import Watcher

from edgefl.errors import ConfigError

UNEVEN = {"name": "dirichlet", "alpha": 0.5}


def result(method, *, local_steps, **config):
    plan = small_plan(method, 4, rounds=3, train={"local_steps": local_steps}, data=UNEVEN, **config)
    return run(plan).results[0]


def test_without_the_term_it_is_fedavg_bit_for_bit():
    assert result("fedprox", local_steps=5, proximal_mu=0.0).equal(result("fedavg", local_steps=5))


@pytest.mark.parametrize("mu", [0.01, 1.0, 10.0])
def test_one_local_step_is_fedavg_for_every_mu(mu):
    assert result("fedprox", local_steps=1, proximal_mu=mu).equal(result("fedavg", local_steps=1))
    assert not result("fedprox", local_steps=2, proximal_mu=mu).equal(result("fedavg", local_steps=2))


def test_a_step_follows_the_proximal_gradient():
    mu = 2.0
    plan = small_plan("fedprox", 1, rounds=1, train={"local_steps": 4}, proximal_mu=mu)
    w = start(plan)
    y = w.clone()
    for batch in batches(plan, 1, range(4)):
        y = y - rate(plan) * (gradient(plan, y, batch) + mu * (y - w))
    assert torch.allclose(run(plan).results[0].values, y, rtol=0, atol=1e-6)


def test_a_larger_mu_stays_nearer_to_the_start():
    plans = [
        small_plan("fedprox", 2, rounds=1, train={"local_steps": 20}, proximal_mu=mu)
        for mu in (0.0, 1.0, 5.0, 15.0)
    ]
    drifts = [float((run(plan).results[0].values - start(plan)).norm()) for plan in plans]
    assert drifts == sorted(drifts, reverse=True) and drifts[-1] < drifts[0] / 3


def test_diverging_settings_are_refused_in_one_line():
    plan = small_plan("fedprox", 2, proximal_mu=20.0)
    with pytest.raises(ConfigError) as caught:
        plan.method.prepare(plan)
    assert str(caught.value) == "method.fedprox.proximal_mu = 20.0: below 2 / learning_rate = 20 is needed"
    plan.method.prepare(small_plan("fedprox", 2, proximal_mu=19.9))


def test_a_budget_of_steps_makes_those_steps():
    train = {"local_steps": 6}
    plan = small_plan("fedprox", 1, rounds=1, train=train, proximal_mu=2.0, budget_steps=4)
    four = small_plan("fedprox", 1, rounds=1, train={"local_steps": 4}, proximal_mu=2.0)
    assert run(plan).results[0].equal(run(four).results[0])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_budget_of_seconds_that_suffices_changes_nothing(momentum):
    train = {"local_steps": 5, "momentum": momentum}
    whole, parts = (
        run(small_plan("fedprox", 2, rounds=2, train=train, proximal_mu=2.0, **budget)).results[0]
        for budget in ({}, {"budget_s": 1e9})
    )
    assert parts.equal(whole)


def test_slow_clients_report_in_time_with_fewer_steps_instead_of_being_dropped():
    """Ten steps take the fast ones just the budget; one that is 3.9 times slower gets 2 done in it."""
    train = {"local_steps": 10}
    alone = small_plan("fedprox", 1, rounds=1, train=train, access=INSTANT)
    round_s = run(alone).time_s
    config = {"slowdowns": [1, 1, 1, 3.9], "access": INSTANT, "train": train, "rounds": 4}
    dropped, kept = Watcher(), Watcher()
    run(small_plan("fedprox", 3, round_deadline_s=1.01 * round_s, **config), dropped)
    plan = small_plan("fedprox", 3, budget_s=1.001 * round_s, round_deadline_s=1.01 * round_s, **config)
    recording = Recording(plan.learner)
    run(plan, kept, recording)
    assert [m["reports"] for _, _, m in dropped.metrics] == [2] * 4
    assert [m["reports"] for _, _, m in kept.metrics] == [3] * 4
    # Every item of a round is one step: 10 + 10 + 2.
    assert len(recording.trained) == 4 * 22
