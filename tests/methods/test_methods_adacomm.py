"""AdaComm and Fixed AdaComm: tau local steps between two averages."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from adsp_lab import PERIOD, lab
from methods_reference import batches, run, sgd
from small import run_small
from toy import Watcher

from edgefl.learning.work import Evaluate
from edgefl.methods.federated.adacomm import fewer
from edgefl.nodes.node import FleetView


def metric(watcher, name):
    return [(time_s, m[name]) for _, time_s, m in watcher.metrics if name in m]


def test_one_client_is_plain_sgd_bit_for_bit():
    plan, _ = lab("fixed-adacomm", speeds=(1,), rounds=4, period_steps=5)
    assert torch.equal(run(plan).results[0].values, sgd(plan, batches(plan, 1, range(20))))


def test_a_fixed_period_is_bsp_whose_clocks_are_that_long():
    fixed, _ = lab("fixed-adacomm", rounds=6, period_steps=5)
    bsp, _ = lab("bsp", rounds=6, train={"local_steps": 5})
    one, other = run(fixed), run(bsp)
    assert torch.allclose(one.results[0].values, other.results[0].values, rtol=0, atol=1e-5)
    assert one.time_s == pytest.approx(other.time_s, rel=1e-6)


def test_a_period_of_the_rule_that_never_changes_is_the_fixed_one_bit_for_bit():
    fixed, _ = lab("fixed-adacomm", rounds=6, period_steps=5)
    adaptive, _ = lab("adacomm", rounds=6, period_steps=5, interval_s=1e9)
    assert run(adaptive).results[0].equal(run(fixed).results[0])


def test_periods_follow_the_loss_and_are_halved_where_it_would_not_lower_them():
    interval = 60.0
    plan, unit = lab("adacomm", rounds=60, period_steps=20, commit=0.2)
    config = plan.config.model_copy(update={"interval_s": interval * unit})
    plan = dataclasses.replace(plan, config=config)
    watcher = Watcher()
    run(plan, watcher)
    held_out = _held_out(plan)
    models = [plan.learner.model.init(), *(model for *_, model in watcher.models)]
    losses = [Evaluate(x, held_out).run(plan.learner).loss for x in models]
    found = metric(watcher, "local_steps")
    starts = [0.0, *(time_s for time_s, _ in found)]  # a round begins where the one before it ends
    steps, next_s, expected = 20, interval * unit, []
    for t in range(60):
        if t and starts[t] >= next_s:
            wanted = math.ceil(math.sqrt(losses[t] / losses[0]) * 20)
            steps = wanted if wanted < steps else max(1, math.ceil(steps / 2))
            next_s = starts[t] + interval * unit
        expected.append(steps)
    assert [tau for _, tau in found] == expected
    assert expected[0] == 20 and expected[-1] == 1 and len(set(expected)) > 4


def _held_out(plan):
    return FleetView(plan, 0, None).held_out(plan.config.num_held_out)


def test_the_period_stays_at_one_and_above():
    assert [fewer(tau, 40, 0.5) for tau in (40, 29, 28, 2, 1)] == [29, 15, 14, 1, 1]
    assert fewer(40, 40, 0.0) == 1


def test_a_round_costs_a_model_each_way():
    outcome = run_small("fixed-adacomm", 3, rounds=4, period_steps=7)
    assert outcome.traffic.payload_bytes == 4 * 3 * 2 * 4 * outcome.results[0].layout.size


def test_periods_are_30_steps_of_the_median_device_where_not_given():
    watcher = Watcher()
    plan, unit = lab("adacomm", rounds=30, period_steps=4)
    run(plan, watcher)
    found = metric(watcher, "local_steps")
    first_s = next(time_s for (time_s, tau), (_, then) in itertools.pairwise(found) if tau != then)
    assert first_s == pytest.approx(2 * 16 * unit, rel=1e-3) and first_s >= PERIOD * unit
