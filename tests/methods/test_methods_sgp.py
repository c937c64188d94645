"""SGP: push-sum loses nothing on any graph, and z is the mean where x alone is not; on even graphs D-PSGD."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from methods_reference import Scattered, batches, gradient, rate, run, scatter, sgd, start, with_programs
from small import small_plan

from edgefl.errors import ConfigError
from edgefl.methods.decentralized.sgp import METHOD, peer
from edgefl.nodes.plan import Crash, FaultPlan, Partition

ONE = {"local_steps": 1}
STILL = {"learning_rate": 1e-30}
"""A rate at which a step changes no float32 value of these models."""
LINEAR = {"name": "linear"}
UNEVEN = [[0, 1], [0, 2], [1, 2], [2, 3], [3, 0]]
"""Node 0 halves what others keep: w settles at 12/13, 8/13, 16/13 and 16/13."""


class KeepsMass(Scattered):
    """A node that starts at values of its own and keeps x and w of each step in a common log."""

    def __init__(self, inner, log):
        super().__init__(inner)
        self.log = log

    def save(self, **state):
        self.log.setdefault(state["step"], {})[self.inner.id] = state["x"].values.double(), state["w"]
        return self.inner.save(**state)


async def keeping(log, node):
    return await peer(KeepsMass(node, log))


def masses(n, rounds, **plan):
    """{step: {node: (x, w)}} of averaging alone, and the models that it began with."""
    log = {}
    made = small_plan("sgp", n, rounds=rounds, train=STILL, model=LINEAR, **plan)
    outcome = run(with_programs(made, peer=partial(keeping, log)))
    assert outcome.status == "finished"
    size = made.learner.model.layout.size
    return log, torch.stack([scatter(size, i) for i in range(n)]).double(), outcome


def sums(row):
    """Sum of x and sum of w over nodes."""
    return sum(x for x, _ in row.values()), sum(w for _, w in row.values())


GRAPHS = [(6, {}), (7, {"graph": "random"}), (4, {"edges": UNEVEN})]


@pytest.mark.parametrize(("n", "config"), GRAPHS, ids=["exponential", "random", "uneven"])
def test_the_sums_of_x_and_of_w_stay(n, config):
    log, X, _ = masses(n, 40, **config)
    assert set(log) == set(range(1, 41))
    for row in log.values():
        x, w = sums(row)
        assert len(row) == n and w == pytest.approx(n, rel=1e-12)
        assert torch.allclose(x / n, X.mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("n", "config"), GRAPHS, ids=["exponential", "random", "uneven"])
def test_all_models_come_to_the_mean(n, config):
    log, X, outcome = masses(n, 80, **config)
    for i in range(n):
        x, w = log[80][i]
        assert torch.allclose(x / w, X.mean(0), rtol=0, atol=1e-5)
        assert torch.allclose(outcome.results[i].values.double(), x / w, rtol=0, atol=1e-6)


def test_on_an_uneven_graph_only_the_weights_make_it_the_mean():
    log, X, _ = masses(4, 80, edges=UNEVEN)
    assert [w for _, (_, w) in sorted(log[80].items())] == pytest.approx([12 / 13, 8 / 13, 16 / 13, 16 / 13])
    x, _ = log[80][1]
    assert float((x - X.mean(0)).abs().max()) > 0.1


@pytest.mark.parametrize("n", [2, 8, 16])
def test_on_the_exponential_graph_of_a_power_of_two_the_mean_is_exact_after_its_logarithm(n):
    log, X, _ = masses(n, n.bit_length() - 1, graph="exponential")
    for step, row in log.items():
        exact = [torch.allclose(x, X.mean(0), rtol=0, atol=1e-5) for x, _ in row.values()]
        assert all(w == 1.0 for _, w in row.values())
        assert all(exact) if step == len(log) else not any(exact)


def matrix(plan, k):
    """P of step k, written out: P[j, i] is what i sends to j."""
    n, config = len(plan.nodes), plan.config
    sends = config.edges or [(i, (i + (1, 2, 4, 8)[k % (n - 1).bit_length()]) % n) for i in range(n)]
    P = np.eye(n)
    for i, j in sends:
        P[j, i] = 1
    return torch.from_numpy(P / P.sum(0)).float()


@pytest.mark.parametrize(("n", "config"), [GRAPHS[0], GRAPHS[2]], ids=["exponential", "uneven"])
def test_steps_are_those_of_the_matrix_form(n, config):
    """X <- P (X - eta G(Z)), w <- P w, z = x / w."""
    plan = small_plan("sgp", n, rounds=7, train=ONE, **config)
    X, w = torch.stack([start(plan)] * n), torch.ones(n)
    for k in range(7):
        Z = X / w[:, None]
        G = torch.stack([gradient(plan, Z[i], batches(plan, i, [k])[0]) for i in range(n)])
        X, w = matrix(plan, k) @ (X - rate(plan) * G), matrix(plan, k) @ w
    results = run(plan).results
    for i in range(n):
        assert torch.allclose(results[i].values, X[i] / w[i], rtol=0, atol=1e-6)


def test_between_two_it_is_d_psgd_with_updated_models_mixed():
    ours = run(small_plan("sgp", 2, rounds=9, train=ONE)).results
    theirs = run(
        small_plan("d-psgd", 2, rounds=9, train=ONE, topology="complete", order="adapt_then_combine")
    ).results
    for i in range(2):
        assert torch.allclose(ours[i].values, theirs[i].values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", [{}, {"graph": "random"}], ids=["exponential", "random"])
def test_one_node_is_sgd_bit_for_bit(config):
    plan = small_plan("sgp", 1, rounds=8, train=ONE, **config)
    assert torch.equal(run(plan).results[0].values, sgd(plan, batches(plan, 0, range(8))))


@pytest.mark.parametrize("graph", ["exponential", "random"])
def test_a_step_costs_a_node_one_model(graph):
    plan = small_plan("sgp", 6, rounds=7, train=ONE, graph=graph)
    outcome = run(plan)
    assert outcome.traffic.payload_bytes == 7 * 6 * 4 * plan.learner.model.layout.size
    pushes = sum(row[0] for (_, _, kind), row in outcome.traffic.table.items() if kind == "Push")
    assert pushes == 7 * 6


def step_s(n, **config):
    return masses(n, 20, **config)[2].time_s / 20


@pytest.mark.parametrize("graph", ["exponential", "random"])
def test_a_departure_takes_its_x_and_w_along_and_nothing_else(graph):
    """Those who live keep their sums from then on, and come to the ratio of these: a mean of what is left."""
    n, one = 6, step_s(6, graph=graph)
    faults = FaultPlan(crashes=(Crash(2, at_s=2.4 * one),), detect_s=one / 10)
    log, X, _ = masses(n, 80, graph=graph, faults=faults)
    living = [i for i in range(n) if i != 2]
    assert 2 not in log[5] and all(sorted(log[k]) == living for k in range(5, 81))
    x, w = sums(log[5])
    assert n - 3 < w < n
    for k in range(6, 81):
        later_x, later_w = sums(log[k])
        assert later_w == pytest.approx(w, rel=1e-12) and torch.allclose(later_x, x, rtol=0, atol=1e-5)
    for i in living:
        assert torch.allclose(log[80][i][0] / log[80][i][1], x / w, rtol=0, atol=1e-5)
    assert float((x / w).max()) < float(X.max()) and float((x / w).min()) > float(X.min())


@pytest.mark.parametrize("graph", ["exponential", "random"])
def test_shares_that_a_dead_receiver_never_got_come_back(graph):
    """Node 2 dies at once and is missed late: the others come to the mean of their own models."""
    one = step_s(6, graph=graph)
    faults = FaultPlan(crashes=(Crash(2, at_s=0.0),), detect_s=3 * one)
    log, X, _ = masses(6, 60, graph=graph, faults=faults)
    mean = X[[0, 1, 3, 4, 5]].mean(0)
    x, w = sums(log[60])
    assert w == pytest.approx(5, rel=1e-12) and torch.allclose(x / 5, mean, rtol=0, atol=1e-6)
    assert all(torch.allclose(x / w, mean, rtol=0, atol=1e-5) for x, w in log[60].values())


@pytest.mark.parametrize("graph", ["exponential", "random"])
def test_who_returns_brings_its_x_and_w_back(graph):
    n, one = 6, step_s(6, graph=graph)
    faults = FaultPlan(crashes=(Crash(2, at_s=2.4 * one, down_s=6 * one),), detect_s=one / 10)
    log, _, _ = masses(n, 90, graph=graph, faults=faults)
    missed = [k for k in range(1, 91) if 2 not in log[k]]
    agreed = missed[-1] + 2  # it saves first after the step that all have agreed on
    assert missed[0] <= 4 and 6 < agreed < 20
    away_w, back_w = sums(log[missed[0] + 1])[1], sums(log[agreed])[1]
    assert away_w + 0.1 < back_w <= n
    for k in range(agreed, 91):
        assert len(log[k]) == n and sums(log[k])[1] == pytest.approx(back_w, rel=1e-12)
    mean = sums(log[agreed])[0] / back_w
    for x, w in log[90].values():
        assert torch.allclose(x / w, mean, rtol=0, atol=1e-5)


def test_a_partition_delays_it_and_loses_nothing():
    faults = FaultPlan(partitions=(Partition(frozenset({0, 1}), at_s=0.0, for_s=0.5),))
    log, X, outcome = masses(6, 30, graph="random", faults=faults)
    x, w = sums(log[30])
    assert outcome.time_s > 0.5 and w == pytest.approx(6, rel=1e-12)
    assert torch.allclose(x / 6, X.mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([[0, 1], [1, 4]], r"edges = \[1, 4\]: two different ids below 4, each pair once"),
        ([[0, 0]], r"edges = \[0, 0\]: two different ids below 4"),
        ([[0, 1], [0, 1]], r"edges = \[0, 1\]: two different ids below 4, each pair once"),
        ([[0, 1], [1, 2], [2, 3]], "a way from every node to every other"),
        ([[1, 0], [2, 0], [3, 0], [1, 2], [2, 3], [3, 1]], "a way from every node to every other"),
    ],
)
def test_impossible_edges_are_refused(edges, message):
    with pytest.raises(ConfigError, match=message):
        METHOD.prepare(small_plan("sgp", 4, edges=edges))
