"""FedAdagrad, FedAdam, FedYogi: limits that are FedAvg, steps by hand, and what a void round changes."""

from __future__ import annotations

import pytest
import torch
from methods_reference import run, start
from small import run_small, small_plan

from edgefl.learning.work import LocalSGD
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.parameters import WeightedMean
from edgefl.patterns.server_optimizer import ServerOptimizerConfig, adaptive_step, second_moment

UNEVEN = {"name": "dirichlet", "alpha": 0.5}
METHODS = ["fedadagrad", "fedadam", "fedyogi"]


def final(method, *, rounds=3, **config):
    return run(small_plan(method, 3, rounds=rounds, data=UNEVEN, **config)).results[0]


@pytest.mark.parametrize("method", METHODS)
def test_with_a_large_tau_and_that_rate_it_is_fedavg(method):
    """With v from 0. From v = tau^2 the denominator is 2 tau at first, and the rate must be that."""
    tau = 1e6
    average = final("fedavg").values
    assert torch.allclose(
        final(method, tau=tau, server_rate=tau, beta1=0.0, bias_correction=True).values,
        average,
        rtol=1e-4,
        atol=1e-6,
    )
    slow = {} if method == "fedadagrad" else {"beta2": 1 - 1e-7}
    found = final(method, tau=tau, server_rate=2 * tau, beta1=0.0, **slow).values
    assert torch.allclose(found, average, rtol=1e-4, atol=1e-6)


def test_with_a_large_tau_beta1_is_server_momentum():
    """x1 = x0 + (1 - beta1) Delta_0, the first of m."""
    tau, beta1 = 1e6, 0.5
    config = {"tau": tau, "server_rate": 2 * tau, "beta1": beta1, "beta2": 1 - 1e-7}
    x0 = start(small_plan("fedadam", 3, rounds=1, data=UNEVEN))
    x1 = final("fedadam", rounds=1, **config).values
    x2 = final("fedadam", rounds=2, **config).values
    delta0 = final("fedavg", rounds=1).values - x0
    assert torch.allclose(x1 - x0, (1 - beta1) * delta0, rtol=1e-3, atol=1e-6)
    delta1 = _delta_from(x1)
    assert torch.allclose(x2 - x1, beta1 * (x1 - x0) + (1 - beta1) * delta1, rtol=1e-3, atol=1e-6)


def _delta_from(x):
    """The mean change that FedAvg's second round makes from x."""
    plan = small_plan("fedavg", 3, rounds=2, data=UNEVEN)
    clients = plan.nodes[1:]
    begin = plan.learner.model.init().with_values(x)
    works = [LocalSGD(begin, spec.data, 1, spec.workload) for spec in clients]
    mean = WeightedMean(begin.layout)
    for work, spec in zip(works, clients, strict=True):
        mean.add(work.run(plan.learner).parameters, len(spec.data))
    return mean.value(otherwise=begin).values - x


@pytest.mark.parametrize("method", ["fedadam", "fedyogi"])
def test_without_memory_each_coordinate_moves_by_its_sign(method):
    """beta1 = beta2 = 0: Adam's v is Delta^2; Yogi's too wherever Delta^2 > v or after one more step."""
    tau, rate = 1e-3, 0.1
    x0 = start(small_plan(method, 3, rounds=1, data=UNEVEN))
    delta = final("fedavg", rounds=1).values - x0
    moved = final(method, rounds=1, beta1=0.0, beta2=0.0, tau=tau, server_rate=rate).values - x0
    v = delta**2 if method == "fedadam" else tau**2 - delta**2 * torch.sign(tau**2 - delta**2)
    expected = rate * delta / (v.sqrt() + tau)
    assert torch.allclose(moved, expected, rtol=1e-3, atol=1e-4)
    assert torch.allclose(expected, rate * delta / (delta.abs() + tau)) == (method == "fedadam")


def test_second_moments_agree_only_where_they_must():
    delta = torch.tensor([0.0, 1.0, 2.0, 3.0])
    square = delta**2
    for v in (torch.zeros(4), square, 2 * square):
        assert torch.allclose(second_moment("yogi", v, delta, 0.9), second_moment("adam", v, delta, 0.9))
    v = torch.full((4,), 1e-6)
    assert not torch.allclose(second_moment("yogi", v, delta, 0.9), second_moment("adam", v, delta, 0.9))
    assert torch.equal(second_moment("adagrad", v, delta, 0.9), v + square)


def test_two_steps_of_adam_by_hand_with_and_without_correction():
    x = small_plan("fedadam", 1).learner.model.init()
    delta = x.with_values(torch.full_like(x.values, 0.5))
    for corrected in (False, True):
        config = ServerOptimizerConfig(bias_correction=corrected, tau=0.1, server_rate=1.0)
        m, v, y, state = 0.0, 0.0 if corrected else 0.01, x.values[0].item(), None
        model = x
        for t in (1, 2):
            model, state = adaptive_step("adam", config, model, delta, state)
            m, v = 0.9 * m + 0.1 * 0.5, 0.99 * v + 0.01 * 0.25
            m_hat, v_hat = (m / (1 - 0.9**t), v / (1 - 0.99**t)) if corrected else (m, v)
            y += m_hat / (v_hat**0.5 + 0.1)
        assert float(model.values[0]) == pytest.approx(y, rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_void_round_changes_neither_the_model_nor_the_moments(method):
    """The reports of the second half come from one client only, and two are needed."""
    alone = FaultPlan(crashes=(Crash(1, at_s=1e-9),), detect_s=1e-9)
    plan = small_plan(method, 2, rounds=3, min_reports=2, faults=alone)
    assert torch.equal(run(plan).results[0].values, start(plan))


@pytest.mark.parametrize("method", METHODS)
def test_it_learns(method):
    plan = small_plan(method, 4, rounds=1)
    d = plan.learner
    x = run_small(method, 4, rounds=30, data=UNEVEN).results[0]
    part = plan.nodes[1].data
    batch = part.take(part.indices)
    assert d.measure(x, batch).loss < 0.5 * d.measure(d.model.init(), batch).loss
