"""The seam carries eleven unlike systems: seven toys of SYSTEMS, and four methods that are here for real."""

from __future__ import annotations

import pytest
import torch
from programs import SYSTEMS, System
from small import digits, run_small
from toy import FAST, Watcher, access, run_toy

from edgefl.data import Batch
from edgefl.learning.learner import Learner
from edgefl.learning.models import ModelConfig, build_model
from edgefl.learning.workload import TrainConfig
from edgefl.runtimes.outcome import Outcome

BY_NAME = {system.name: system for system in SYSTEMS}


def run(system: System, **plan) -> Outcome:
    return run_toy(system.programs, system.messages, ends_with=system.ends_with, **plan)


@pytest.mark.parametrize("link_model", ["fair", "local-fair", "fifo"])
@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: s.name)
def test_it_does_what_its_paper_says(system, link_model):
    outcome = run(system, access=access(1e7, latency_s=1e-4, jitter=0.3), link_model=link_model, seed=2)
    assert outcome.status == "finished"
    system.check(outcome.results)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: s.name)
def test_it_leaves_one_trace_twice(system):
    traces = []
    for _ in range(2):
        watcher = Watcher()
        outcome = run(system, access=access(1e6, latency_s=1e-3, jitter=0.5), seed=4, watcher=watcher)
        traces.append((outcome.time_s, outcome.results, outcome.traffic.table, watcher.spans))
    assert traces[0] == traces[1]


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_switchml_is_exact_under_loss(loss, seed):
    """102 values in packets of 8, three times; without loss each packet goes up and down once."""
    links = access(1e7, latency_s=1e-3, jitter=0.5, loss=loss)
    outcome = run(BY_NAME["switchml"], access=links, seed=seed)
    BY_NAME["switchml"].check(outcome.results)
    sent = sum(row[0] for (_, _, kind), row in outcome.traffic.table.items() if kind == "Packet")
    assert sent == 4 * 13 * 3 if loss == 0 else sent > 4 * 13 * 3


def test_dapple_ends_in_the_time_of_one_forward_one_backward():
    """(M + S - 1)(F + B) = 19 x 3 with equal stages and free links."""
    assert run(BY_NAME["dapple"], access=FAST).time_s == pytest.approx(57.0, rel=1e-4)


def test_prague_does_not_wait_for_the_slow_worker_as_a_ring_would():
    """Worker 0 takes 5 times longer: in ten steps the others are done well before its last."""
    watcher = Watcher()
    run(BY_NAME["prague"], access=FAST, seed=1, watcher=watcher)
    ends = {
        i: max(end for node, kind, _, end, _ in watcher.spans if node == i and kind == "compute")
        for i in range(8)
    }
    assert ends[0] >= 0.5 and sum(ends[i] for i in range(1, 8)) / 7 < 0.8 * ends[0]


def accuracy(parameters):
    dataset = digits()
    learner = Learner(build_model(ModelConfig(name="mlp"), dataset, 1), TrainConfig())
    found = learner.measure(parameters, Batch(dataset.x_test, dataset.y_test))
    return found.correct / found.num_targets


@pytest.mark.parametrize(
    ("method", "config"),
    [("fedavg", {}), ("ad-psgd", {}), ("divshare", {"recipients": 3}), ("ring-allreduce", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_real_methods_learn(method, config):
    outcome = run_small(method, 6, rounds=100, train={"local_steps": 2}, **config)
    models = list(outcome.results.values())
    mean = models[0].with_values(torch.stack([x.values for x in models]).mean(0))
    assert accuracy(mean) > 0.8
