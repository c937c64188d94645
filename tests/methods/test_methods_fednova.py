"""FedNova: FedAvg for equal work; for unequal work a fixed point that FedAvg misses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from methods_reference import batches, gradient, rate, run, start
from quadratics import distance, optimum, quadratic_plan
from small import small_plan

from edgefl.errors import ConfigError
from edgefl.methods.federated.fednova import norm_of_weights

UNEVEN = {"name": "dirichlet", "alpha": 0.5}


def test_norms_of_the_gradients_weights():
    assert norm_of_weights(7, 0.0, 0.0) == 7
    assert norm_of_weights(7, 0.9, 0.0) == pytest.approx(23.0467, abs=1e-4)
    by_hand = sum(sum(0.9**j for j in range(left)) for left in range(1, 8))
    assert norm_of_weights(7, 0.9, 0.0) == pytest.approx(by_hand)
    assert norm_of_weights(3, 0.0, 0.1) == pytest.approx(1 + 0.9 + 0.81)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equal_work_is_fedavg_to_rounding(momentum):
    train = {"local_steps": 4, "momentum": momentum}
    one, two = (
        run(small_plan(m, 4, rounds=3, train=train, data=UNEVEN)).results[0] for m in ("fednova", "fedavg")
    )
    assert torch.allclose(one.values, two.values, rtol=1e-5, atol=1e-6)


def test_one_step_each_is_gradient_descent_on_the_weighted_mean():
    plan = small_plan("fednova", 3, rounds=2, train={"local_steps": 1}, data=UNEVEN)
    sizes = [len(spec.data) for spec in plan.nodes[1:]]
    x = start(plan)
    for t in range(2):
        steps = [n * gradient(plan, x, batches(plan, k, [t])[0]) for k, n in enumerate(sizes, 1)]
        x = x - rate(plan) * sum(steps) / sum(sizes)
    assert torch.allclose(run(plan).results[0].values, x, rtol=1e-5, atol=1e-6)


def test_a_step_of_unequal_work_by_hand():
    train = {"batch_size": 8, "local_steps": None, "local_epochs": 1}
    plan = quadratic_plan("fednova", [8, 16], rounds=1, rate=0.1, train=train)
    w, p, moves = start(plan), [1 / 3, 2 / 3], []
    for k, tau in ((1, 1), (2, 2)):
        y = w.clone()
        for batch in batches(plan, k, range(tau)):
            y = y - 0.1 * regression_gradient(plan, y, batch)
        moves.append((w - y) / tau)
    tau_eff = p[0] * 1 + p[1] * 2
    expected = w - tau_eff * (p[0] * moves[0] + p[1] * moves[1])
    assert torch.allclose(run(plan).results[0].values, expected, rtol=1e-5, atol=1e-6)


def regression_gradient(plan, x, batch):
    design = torch.cat([batch.x, torch.ones(len(batch), 1)], 1)
    return 2 * design.T @ (design @ x - batch.y[:, 0]) / len(batch)


def whole_share_error(method, eta, taus=(1, 4, 16)):
    """The same with whole shares as batches, so that only the number of steps differs."""
    sizes = [12, 12, 12]
    plan = quadratic_plan(method, sizes, rounds=round(6 / eta), rate=eta, train={"local_steps": 1})
    nodes = [plan.nodes[0]]
    for spec, tau in zip(plan.nodes[1:], taus, strict=True):
        nodes.append(replace(spec, workload=spec.workload.model_copy(update={"steps": tau})))
    plan = replace(plan, nodes=tuple(nodes))
    return distance(run(plan).results[0], optimum(plan, [1 / 3] * 3))


@pytest.mark.slow
def test_the_fixed_point_tends_to_the_optimum_linearly_in_eta_and_fedavgs_does_not():
    nova = [whole_share_error("fednova", eta) for eta in (0.04, 0.004)]
    average = [whole_share_error("fedavg", eta) for eta in (0.04, 0.004)]
    assert nova[0] / nova[1] == pytest.approx(10, rel=0.25)
    assert average[1] > 20 * nova[1] and average[0] / average[1] < 2


@pytest.mark.parametrize(
    ("train", "config", "key"),
    [
        ({"optimizer": "adam"}, {}, "train.optimizer"),
        ({"momentum": 0.9, "nesterov": True}, {}, "train.optimizer"),
        ({"momentum": 0.9}, {"proximal_mu": 0.1}, "method.fednova.proximal_mu"),
        ({}, {"proximal_mu": 20.0}, "method.fednova.proximal_mu"),
    ],
)
def test_what_it_cannot_normalise_is_refused(train, config, key):
    plan = small_plan("fednova", 2, train=train, **config)
    with pytest.raises(ConfigError) as caught:
        plan.method.prepare(plan)
    assert caught.value.key == key and "\n" not in str(caught.value)
