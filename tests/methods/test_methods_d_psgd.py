"""D-PSGD: mixing keeps the mean and contracts; when it is large-batch SGD and when not."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from methods_reference import (
    Scattered,
    batches,
    gradient,
    rate,
    run,
    scatter,
    sgd,
    start,
    union,
    with_programs,
)
from small import small_plan
from toy import Watcher

from edgefl.experiment.check.suite import Laboratory
from edgefl.methods.decentralized import d_psgd
from edgefl.network.graphs import make_topology
from edgefl.network.mixing import MixingMatrix, metropolis
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.patterns.edges import Edges

ONE = {"local_steps": 1}


def reference(plan, rounds, adapt_first):
    """(n, P): X <- W X - eta G(X), or W (X - eta G(X)), written out."""
    n = len(plan.nodes)
    W = torch.from_numpy(plan.mixing.dense()).float()
    X = torch.stack([start(plan)] * n)
    for k in range(rounds):
        G = torch.stack([gradient(plan, X[i], batches(plan, i, [k])[0]) for i in range(n)])
        X = W @ (X - rate(plan) * G) if adapt_first else W @ X - rate(plan) * G
    return X


def models(outcome):
    return torch.stack([outcome.results[i].values for i in sorted(outcome.results)])


@pytest.mark.parametrize("order", ["combine_then_adapt", "adapt_then_combine"])
@pytest.mark.parametrize("topology", ["ring", "star"])
def test_steps_are_those_of_the_matrix_form(topology, order):
    plan = small_plan("d-psgd", 5, rounds=6, train=ONE, topology=topology, order=order)
    X = reference(plan, 6, order == "adapt_then_combine")
    assert torch.allclose(models(run(plan)), X, rtol=0, atol=1e-6)


def test_the_mean_moves_by_the_mean_gradient_at_every_step():
    plan, watcher = small_plan("d-psgd", 5, rounds=6, train=ONE, topology="ring"), Watcher()
    run(plan, watcher)
    step = {(node, k): x.values for node, _, k, x in watcher.models}
    step.update({(i, 0): start(plan) for i in range(5)})
    for k in range(6):
        before = [step[i, k] for i in range(5)]
        G = [gradient(plan, x, batches(plan, i, [k])[0]) for i, x in enumerate(before)]
        expected = sum(before) / 5 - rate(plan) * sum(G) / 5
        assert torch.allclose(sum(step[i, k + 1] for i in range(5)) / 5, expected, rtol=0, atol=1e-6)


def test_on_the_complete_graph_only_adapt_then_combine_is_all_reduce_sgd():
    plans = [
        small_plan("d-psgd", 4, rounds=5, train=ONE, topology="complete", equal_shares=True, order=order)
        for order in ("adapt_then_combine", "combine_then_adapt")
    ]
    large = sgd(plans[0], [union(batches(plans[0], i, [k])[0] for i in range(4)) for k in range(5)])
    adapted, combined = (models(run(plan)) for plan in plans)
    assert torch.allclose(adapted, large.expand(4, -1), rtol=0, atol=1e-5)
    assert float((combined[0] - combined[1]).abs().max()) > 1e-3
    assert float((combined.mean(0) - large).abs().max()) > 1e-4


def test_combine_then_adapt_leaves_all_reduce_sgd_from_the_second_step_on():
    """On the complete graph the first means agree; then the models differ, and so do their gradients."""
    for rounds in (1, 2):
        plan = small_plan("d-psgd", 4, rounds=rounds, train=ONE, topology="complete", equal_shares=True)
        large = sgd(plan, [union(batches(plan, i, [k])[0] for i in range(4)) for k in range(rounds)])
        apart = float((models(run(plan)).mean(0) - large).abs().max())
        assert apart < 1e-6 if rounds == 1 else apart > 1e-3


@pytest.mark.parametrize("order", ["combine_then_adapt", "adapt_then_combine"])
def test_one_node_is_sgd_bit_for_bit(order):
    plan = small_plan("d-psgd", 1, rounds=8, train=ONE, topology="complete", order=order)
    assert torch.equal(run(plan).results[0].values, sgd(plan, batches(plan, 0, range(8))))


async def mixing_only(node):
    """D-PSGD without its gradients, from models that differ."""
    saved, edges = node.saved or {"x": Scattered(node).model.init(), "step": 0}, Edges(node)
    x = saved["x"]
    for k in node.rounds(await edges.begin(saved["step"])):
        x = await d_psgd._mixed(node, edges, k, x)
        node.publish(x, step=k + 1)
        await node.save(x=x, step=k + 1)
    return x


def mixed(mixing, n, rounds, topology="complete", faults=None):
    """(rounds + 1, n, P) the models before and after each round of mixing alone."""
    plan = small_plan("d-psgd", n, rounds=rounds, topology=topology, mixing=mixing, faults=faults)
    watcher = Watcher()
    run(with_programs(plan, peer=mixing_only), watcher)
    size = plan.learner.model.layout.size
    X = torch.stack([scatter(size, i) for i in range(n)]).repeat(rounds + 1, 1, 1)
    for node, _, k, x in watcher.models:
        X[k, node] = x.values
    return X


def drawn_mixing(n, seed):
    """A doubly stochastic matrix that is not symmetric: a mean of random permutations (Birkhoff)."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(4))
    dense = sum(share * np.eye(n)[rng.permutation(n)] for share in shares)
    return MixingMatrix("drawn", n, lambda i: {j: float(dense[i, j]) for j in range(n)})


@pytest.mark.parametrize("seed", range(5))
def test_any_doubly_stochastic_mixing_keeps_the_mean(seed):
    X = mixed(drawn_mixing(6, seed), 6, rounds=10)
    assert torch.allclose(X.mean(1), X[0].mean(0).expand(11, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("topology", ["ring", "star", "torus"])
def test_consensus_contracts_by_the_second_eigenvalue(topology):
    W = metropolis(make_topology(topology, 8, 1))
    X = mixed(W, 8, rounds=15, topology=topology)
    errors = (X - X.mean(1, keepdim=True)).flatten(1).norm(dim=1)
    factors = errors[1:] / errors[:-1]
    second = W.second_eigenvalue()
    assert float(factors.max()) <= second + 1e-4
    assert float(factors[-1]) == pytest.approx(second, rel=0.02)


def test_after_a_departure_the_mean_of_those_that_live_is_kept():
    faults = FaultPlan(crashes=(Crash(2, at_s=0.0),), detect_s=1e-5)
    X = mixed(metropolis(make_topology("ring", 5, 1)), 5, rounds=12, topology="ring", faults=faults)
    alive = [0, 1, 3, 4]
    means = X[:, alive].mean(1)
    assert torch.allclose(means, means[0].expand(13, -1), rtol=0, atol=1e-6)
    assert float((X[-1, 0] - X[0, 0]).abs().max()) > 0.1


@pytest.mark.parametrize("num_lost", [1, 2])
def test_who_returns_takes_part_from_an_agreed_step_and_the_mean_of_all_is_kept_from_there(num_lost):
    rounds, topology = 60, make_topology("ring", 6, 1)
    plan = small_plan("d-psgd", 6, rounds=20, topology="ring")
    step_s = run(with_programs(plan, peer=mixing_only)).time_s / 20
    lost = [2, 3][:num_lost]  # two at once are each other's neighbors
    crashes = tuple(Crash(j, at_s=(4.5 + j / 9) * step_s, down_s=(6 + j / 9) * step_s) for j in lost)
    faults = FaultPlan(crashes=crashes, detect_s=step_s / 10)
    plan = small_plan("d-psgd", 6, rounds=rounds, topology="ring", mixing=metropolis(topology), faults=faults)
    watcher = Watcher()
    run(with_programs(plan, peer=mixing_only), watcher)
    steps = {i: [k for node, _, k, _ in watcher.models if node == i] for i in range(6)}
    X = {(node, k): x.values for node, _, k, x in watcher.models}
    agreed = max(next(b for a, b in pairwise(steps[j]) if b > a + 1) for j in lost)
    assert 5 < agreed < 20 and all(steps[j][-1] == rounds for j in lost)
    means = torch.stack([sum(X[i, k] for i in range(6)) / 6 for k in range(agreed, rounds + 1)])
    assert torch.allclose(means, means[0].expand_as(means), rtol=0, atol=1e-6)
    for k, most in ((agreed, 10.0), (rounds, 0.01)):
        assert max(float((X[i, k] - X[0, k]).abs().max()) for i in range(6)) < most
    assert float((X[2, agreed] - X[0, agreed]).abs().max()) > 0.1


@pytest.mark.parametrize("seed", [55, 218])
def test_several_that_return_at_once_on_a_complete_graph_do_not_lock_up(seed):
    """Words of different kinds overtook each other; a node had asked who then died and returned itself."""
    laboratory = Laboratory("d-psgd", ["network.topology=complete"])
    assert laboratory.trial(laboratory.schedule(seed)).verdict.good


def test_a_step_costs_one_model_to_each_neighbor():
    plan = small_plan("d-psgd", 6, rounds=7, train=ONE, topology="ring")
    outcome = run(plan)
    assert outcome.traffic.payload_bytes == 7 * 6 * 2 * 4 * plan.learner.model.layout.size
