"""CHOCO-SGD: D-PSGD without compression, a mean that stays, and consensus through single entries."""

from __future__ import annotations

import pytest
import torch
from methods_reference import Scattered, run, scatter, with_programs
from quadratics import quadratic_plan
from small import run_small, small_plan

from edgefl.methods.decentralized import choco_sgd
from edgefl.nodes.plan import Crash, FaultPlan

RING = {"topology": "ring", "train": {"local_steps": 1}}


async def scattered(node):
    return await choco_sgd.peer(Scattered(node))


def spread(results):
    rows = torch.stack([v.values.double() for _, v in sorted(results.items())])
    return float((rows - rows.mean(0)).norm()), rows.mean(0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_compression_it_is_adapt_then_combine_d_psgd(momentum):
    train = {"local_steps": 1, "momentum": momentum}
    choco = run(small_plan("choco-sgd", 5, rounds=6, topology="ring", train=train)).results
    d_psgd = run(
        small_plan("d-psgd", 5, rounds=6, topology="ring", train=train, order="adapt_then_combine")
    ).results
    for i in range(5):
        assert torch.allclose(choco[i].values, d_psgd[i].values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gamma", [None, 0.05])
@pytest.mark.parametrize(
    "compress", [{}, {"name": "top-k", "fraction": 0.1}, {"name": "qsgd", "bucket": 64}], ids=str
)
def test_without_gradients_the_mean_stays_and_the_spread_falls(compress, gamma):
    train = {"local_steps": 1, "learning_rate": 1e-30}
    plan = small_plan("choco-sgd", 4, rounds=40, topology="ring", train=train, compress=compress, gamma=gamma)
    results = run(with_programs(plan, peer=scattered)).results
    begun = torch.stack([scatter(plan.learner.model.layout.size, i).double() for i in range(4)])
    after, mean = spread(results)
    assert torch.allclose(mean, begun.mean(0), rtol=0, atol=1e-5)
    assert after < 0.6 * float((begun - begun.mean(0)).norm())


def test_one_entry_a_step_leads_a_ring_of_four_to_consensus():
    plan = quadratic_plan(
        "choco-sgd", [8] * 4, rounds=400, rate=1e-30, train={"local_steps": 1}, topology="ring",
        compress={"name": "top-k", "fraction": 0.2}, gamma=0.2, features=4,
    )  # fmt: skip
    assert plan.learner.model.layout.size == 5
    assert spread(run(with_programs(plan, peer=scattered)).results)[0] < 2e-6  # a few units of float32


def test_bytes_are_those_of_the_compressed_differences():
    outcome = run_small("choco-sgd", 4, rounds=3, compress={"name": "top-k", "fraction": 0.01}, **RING)
    d = outcome.results[0].layout.size
    assert outcome.traffic.payload_bytes == 3 * 4 * 2 * 8 * round(0.01 * d)


def test_with_a_tenth_of_the_entries_it_learns_like_d_psgd():
    losses = {}
    for method, compress in (("d-psgd", {}), ("choco-sgd", {"name": "top-k", "fraction": 0.1})):
        plan = small_plan(method, 4, rounds=60, compress=compress, topology="ring", train={"local_steps": 2})
        part = plan.nodes[0].data
        losses[method] = plan.learner.measure(run(plan).results[0], part.take(part.indices)).loss
    assert losses["choco-sgd"] < 1.2 * losses["d-psgd"]


@pytest.mark.parametrize("returns", [False, True])
def test_a_neighbor_that_is_gone_is_dropped(returns):
    step_s = run_small("choco-sgd", 4, rounds=1, **RING).time_s
    crash = Crash(2, at_s=3.5 * step_s, down_s=2 * step_s if returns else None)
    faults = FaultPlan(crashes=(crash,), detect_s=step_s / 10)
    outcome = run_small("choco-sgd", 4, rounds=12, faults=faults, compress={"name": "top-k"}, **RING)
    assert outcome.status == "finished" and sorted(outcome.results) == (
        [0, 1, 2, 3] if returns else [0, 1, 3]
    )
    assert all(bool(v.values.isfinite().all()) for v in outcome.results.values())


@pytest.mark.parametrize(
    "compress", [{}, {"name": "top-k", "fraction": 0.25}, {"name": "qsgd", "bucket": 64}], ids=str
)
def test_both_ends_of_an_edge_to_who_returns_begin_with_copies_of_zero_and_reach_consensus(compress):
    train = {"local_steps": 1, "learning_rate": 1e-30}
    more = {"topology": "ring", "train": train, "compress": compress}
    kept = {}

    class Ear(Scattered):
        def save(self, **state):
            kept[self.id, state["step"]] = state
            return self.inner.save(**state)

    async def peer(node):
        return await choco_sgd.peer(Ear(node))

    step_s = run(with_programs(small_plan("choco-sgd", 4, rounds=10, **more), peer=peer)).time_s / 10
    faults = FaultPlan(crashes=(Crash(2, at_s=4.5 * step_s, down_s=5 * step_s),), detect_s=step_s / 10)
    plan = small_plan("choco-sgd", 4, rounds=120, faults=faults, **more)
    kept.clear()
    results = run(with_programs(plan, peer=peer)).results
    agreed = max(k for (i, k) in kept if i == 2 and (i, k - 1) not in kept)
    assert 5 < agreed < 20
    for k in (agreed, 120):
        for i, j in ((1, 2), (2, 3), (3, 0), (0, 1)):  # what one end holds of the other is what that one has
            for a, b in ((i, j), (j, i)):
                begun, theirs = kept[a, k]["theirs"][b]
                assert theirs.equal(kept[b, k]["own"][begun]), (a, b, k)
    begun = {j: kept[1, agreed]["theirs"][j][0] for j in (0, 2)}
    assert begun == {0: 0, 2: agreed - 1}
    means = [sum(kept[i, k]["x"].values.double() for i in range(4)) / 4 for k in (agreed, 120)]
    assert torch.allclose(means[0], means[1], rtol=0, atol=1e-5)
    apart = spread({i: kept[i, agreed]["x"] for i in range(4)})[0]
    assert spread(results)[0] < 0.5 * apart
