"""FedProx: FedAvg at mu = 0 and for one local step; nearer to the round's start the larger mu."""

from __future__ import annotations

import pytest
import torch
from methods_reference import batches, gradient, rate, run, start
from small import small_plan

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
