"""Combo: segments pulled from many peers at once, and what that changes in a round's time and mixing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from methods_reference import Scattered, batches, run, scatter, sgd, with_programs
from small import run_small, small_plan
from toy import Watcher, access

from edgefl.errors import ConfigError
from edgefl.keyed import generator
from edgefl.methods.decentralized.combo import METHOD, Segment, average, deal, worker
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.parameters import Layout, Vector
from edgefl.parameters.packing import segment_bounds

STILL = {"learning_rate": 1e-30}
"""A rate at which a step changes no float32 value of these models."""
LINEAR = {"name": "linear"}
D = 650
"""Values of the linear model."""


async def scattered(node):
    return await worker(Scattered(node))


def still_run(n, *, rounds, watcher=None, program=scattered, **plan):
    """Combo that only mixes, from models that differ: the models at the end and at the start."""
    made = small_plan("combo", n, rounds=rounds, train=STILL, **{"model": LINEAR} | plan)
    outcome = run(with_programs(made, worker=program), watcher)
    return outcome, torch.stack([scatter(D, i) for i in range(n)])


def ended(outcome):
    return torch.stack([outcome.results[i].values for i in sorted(outcome.results)])


def test_one_worker_alone_is_sgd_bit_for_bit():
    plan = small_plan("combo", 1, rounds=4)
    assert torch.equal(run(plan).results[0].values, sgd(plan, batches(plan, 0, range(8))))


@pytest.mark.parametrize("S", [1, 3, 10])
def test_with_all_peers_as_replicas_all_hold_the_mean_weighted_by_examples(S):
    data = {"name": "dirichlet", "alpha": 0.5, "min_examples": 8}
    n = 5
    outcome, X = still_run(n, rounds=1, replicas=n - 1, segments=S, data=data)
    plan = small_plan("combo", n, data=data, replicas=n - 1)
    sizes = torch.tensor([float(len(spec.data)) for spec in plan.nodes])
    assert len(set(sizes.tolist())) > 1
    mean = (sizes / sizes.sum()) @ X
    assert torch.allclose(ended(outcome), mean.expand_as(X), rtol=0, atol=1e-5)


def test_full_replication_is_fedavg_with_all_clients_in_every_round():
    common = {"rounds": 3, "data": {"name": "dirichlet", "alpha": 0.5, "min_examples": 8}}
    combo = run(small_plan("combo", 4, replicas=3, segments=7, **common))
    fedavg = run(small_plan("fedavg", 4, **common))
    assert torch.allclose(combo.results[0].values, fedavg.results[0].values, rtol=0, atol=1e-5)


def test_the_same_peers_for_every_segment_make_the_number_of_segments_irrelevant():
    """Bit for bit: sums go by ascending worker id, the worker's own model in its place."""
    layout = Layout.of_shapes([("x", (12,))])
    X = {j: Vector(layout, scatter(12, j)) for j in range(4)}
    sizes = {0: 5, 1: 7, 2: 11, 3: 13}

    def mixed(S):
        bounds = segment_bounds(12, S)
        got = {
            (l, j): Segment(0, l, sizes[j], X[j][begin:end])
            for l, (begin, end) in enumerate(bounds)
            for j in (0, 3)
        }
        return average(X[2], 2, sizes[2], S, got)

    assert mixed(1).equal(mixed(12)) and mixed(1).equal(mixed(5))
    expected = (5 * X[0].values + 11 * X[2].values + 13 * X[3].values) / 29
    assert torch.allclose(mixed(1).values, expected, rtol=0, atol=1e-6)


def test_one_segment_is_plain_gossip_with_the_same_draws():
    outcome, X = still_run(6, rounds=1, segments=1, replicas=2)
    examples = [len(spec.data) for spec in small_plan("combo", 6).nodes]
    for i in range(6):
        peers = deal(generator(1, "peers", i, 0), [j for j in range(6) if j != i], 1, 2)[0]
        rows = X[sorted([i, *peers])]
        sizes = torch.tensor([float(examples[j]) for j in sorted([i, *peers])])
        assert torch.allclose(outcome.results[i].values, (sizes / sizes.sum()) @ rows, rtol=0, atol=1e-6)


# --- the deal --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "S", "R"), [(12, 5, 2), (12, 11, 1), (12, 10, 2), (4, 3, 3), (6, 20, 4), (5, 1, 2)]
)
def test_every_segment_gets_different_peers_and_links_are_spread(n, S, R):
    peers = list(range(1, n))
    for seed in range(20):
        hands = deal(np.random.default_rng(seed), peers, S, R)
        assert [len(set(hand)) for hand in hands] == [R] * S
        loads = np.bincount([j for hand in hands for j in hand], minlength=n)[1:]
        distinct = n - 1 >= S * R
        assert loads.max() == 1 if distinct else loads.max() - loads.min() <= 2


def test_peers_are_drawn_uniformly():
    counts = np.zeros((3, 6))
    for seed in range(3000):
        for l, hand in enumerate(deal(np.random.default_rng(seed), range(6), 3, 2)):
            counts[l, hand] += 1
    assert np.abs(counts / 3000 - 2 / 6).max() < 0.03


def test_fewer_peers_than_replicas_are_all_taken():
    assert deal(np.random.default_rng(0), [4, 2], 2, 5) == [[2, 4], [2, 4]]
    assert deal(np.random.default_rng(0), [], 2, 5) == [[], []]


# --- mixing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("R", "factor"), [(1, 0.4545), (2, 0.2727), (4, 0.1273), (11, 0.0)])
def test_contraction_of_a_zero_mean_by_n_minus_1_minus_r_over_n_minus_1_times_r_plus_1(R, factor):
    """n = 12, equal sizes: E[x'^2] / E[x^2], the same for every number of segments."""
    n, rng = 12, np.random.default_rng(0)
    assert (n - 1 - R) / ((n - 1) * (R + 1)) == pytest.approx(factor, abs=1e-4)
    for S in (1, 4):
        before = after = 0.0
        for _ in range(600):
            x = rng.standard_normal(n)
            x -= x.mean()
            for i in range(n):
                hands = deal(rng, [j for j in range(n) if j != i], S, R)
                after += np.mean([((x[i] + x[hand].sum()) / (R + 1)) ** 2 for hand in hands]) / n
            before += np.mean(x**2)
        assert after / before == pytest.approx(factor, rel=0.06, abs=1e-9)


def test_the_mean_drifts_in_a_round_but_not_on_average():
    n, rng = 12, np.random.default_rng(1)
    x = rng.standard_normal(n)
    means = []
    for _ in range(2000):
        hands = [deal(rng, [j for j in range(n) if j != i], 1, 2)[0] for i in range(n)]
        means.append(np.mean([(x[i] + x[hand].sum()) / 3 for i, hand in enumerate(hands)]))
    assert np.std(means) > 0.02 and np.mean(means) == pytest.approx(x.mean(), abs=0.01)


def test_the_programs_contract_as_the_deal_says():
    """n = 12, R = 2, equal sizes: the spread of 650 coordinates about their mean falls to 0.27 in a round."""
    outcome, X = still_run(12, rounds=1, segments=5, replicas=2, equal_shares=True)
    X = X - X.mean(0)
    now = ended(outcome) - torch.stack([scatter(D, i) for i in range(12)]).mean(0)
    assert float((now**2).sum() / (X**2).sum()) == pytest.approx(0.2727, rel=0.1)


# --- bytes and time --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("S", "R"), [(1, 1), (10, 2), (3, 4)])
def test_a_worker_receives_r_models_a_round(S, R):
    rounds, n = 3, 6
    outcome = run_small("combo", n, rounds=rounds, segments=S, replicas=R, model=LINEAR)
    received = dict.fromkeys(range(n), 0)
    for (_, i, kind), row in outcome.traffic.table.items():
        if kind == "Segment":
            received[i] += row[1]
            assert row[2] - row[1] <= 160 * row[0]  # a header each
        else:
            assert row[1] == 0
    assert set(received.values()) == {rounds * R * 4 * D}
    pulls = sum(row[0] for (_, _, kind), row in outcome.traffic.table.items() if kind == "Pull")
    assert pulls == rounds * n * S * R


def round_s(n, S, R, seeds=3):
    """Seconds of a round without training, in models at the access rate; a path holds a tenth of it."""
    C, times = 1e6, []
    for seed in range(seeds):
        plan = small_plan(
            "combo", n, rounds=1, seed=seed, segments=S, replicas=R, access=access(C), link_model="fair",
            train=STILL | {"local_steps": 1}, model={"name": "mlp", "hidden": [900]},
        )  # fmt: skip
        network = dataclasses.replace(plan.network, path_bytes_per_s=C / 10)
        plan = dataclasses.replace(plan, network=network)
        d = plan.learner.model.layout.size
        watcher = Watcher()
        outcome = run(plan, watcher)
        trained_s = max(end for _, kind, _, end, _ in watcher.spans if kind == "compute")
        times.append((outcome.time_s - trained_s) / (4 * d / C))
    return sum(times) / seeds


@pytest.mark.parametrize(("S", "R"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_few_segments_take_ten_over_s(S, R):
    assert round_s(20, S, R, seeds=1) == pytest.approx(10 / S, rel=0.01)


@pytest.mark.parametrize(("S", "R"), [(5, 1), (10, 1), (20, 1), (5, 2), (10, 2), (20, 2)])
def test_many_segments_take_at_most_1_7_times_the_bound(S, R):
    bound = max(10 / S, R)
    assert bound * 0.99 <= round_s(20, S, R, seeds=1) <= 1.7 * bound


def test_two_segments_on_one_link_go_one_after_the_other():
    """19 peers: with 20 segments one peer is asked twice, and the last half a unit is that link's alone."""
    assert round_s(20, 19, 1, seeds=1) == pytest.approx(1.0, abs=0.05)
    assert round_s(20, 20, 1, seeds=1) == pytest.approx(1.5, abs=0.05)


# --- rounds, snapshots, losses -----------------------------------------------------------------------------


def test_a_worker_that_runs_ahead_is_asked_for_old_rounds_and_has_them():
    """One worker is four times slower: the others are at later rounds when it pulls, at most 8 back."""
    watcher = Watcher()
    outcome = run_small(
        "combo", 6, rounds=8, segments=2, replicas=1, slowdowns=[4, 1, 1, 1, 1, 1], watcher=watcher
    )
    assert outcome.status == "finished"
    assert not any("pulls_of_dropped_rounds" in m for _, _, m in watcher.metrics)


@pytest.mark.parametrize(("snapshots", "dropped"), [(8, False), (1, True)])
def test_equal_devices_ask_for_no_round_that_was_dropped(snapshots, dropped):
    """One pull a round and times that differ: workers run ahead, not further than eight snapshots reach."""
    watcher = Watcher()
    run_small(
        "combo", 8, rounds=40, watcher=watcher, segments=1, replicas=1, snapshots=snapshots,
        equal_shares=True, model=LINEAR, faults=FaultPlan(compute_jitter=0.3),
    )  # fmt: skip
    assert any("pulls_of_dropped_rounds" in m for _, _, m in watcher.metrics) == dropped


def test_a_dropped_round_is_answered_from_the_oldest_and_counted():
    watcher = Watcher()
    slow = {"slowdowns": [40, 1, 1, 1, 1, 1, 1, 1], "segments": 1, "replicas": 1, "snapshots": 1}
    outcome = run_small("combo", 8, rounds=12, watcher=watcher, **slow)
    assert outcome.status == "finished"
    assert sum(m.get("pulls_of_dropped_rounds", 0) for _, _, m in watcher.metrics) > 0


def test_a_pull_to_a_peer_that_is_gone_goes_to_another():
    """R = 2 of 3 peers, of whom one dies while it trains: all pulls end with the two that live."""
    faults = FaultPlan(crashes=(Crash(3, 1e-6),), detect_s=1e-3)
    outcome, X = still_run(4, rounds=1, replicas=2, segments=1, faults=faults, equal_shares=True)
    assert sorted(outcome.results) == [0, 1, 2]
    for x in ended(outcome):
        assert torch.allclose(x, X[:3].mean(0), rtol=0, atol=1e-5)


def test_a_worker_that_returns_goes_on_in_its_peers_round():
    undisturbed = run_small("combo", 5, rounds=10).time_s
    faults = FaultPlan(crashes=(Crash(2, 0.2 * undisturbed, 0.4 * undisturbed),), detect_s=0.01 * undisturbed)
    watcher = Watcher()
    outcome = run_small("combo", 5, rounds=10, faults=faults, watcher=watcher)
    assert outcome.status == "finished" and len(outcome.results) == 5
    back = [step for node, time_s, step, _ in watcher.models if node == 2 and time_s > 0.6 * undisturbed]
    before = max(step for node, time_s, step, _ in watcher.models if node == 2 and time_s < 0.2 * undisturbed)
    assert back[0] > before + 1 and back[-1] == 10


def test_a_worker_that_returns_when_all_have_ended_ends_too():
    undisturbed = run_small("combo", 4, rounds=3).time_s
    faults = FaultPlan(crashes=(Crash(2, 0.5 * undisturbed, 5 * undisturbed),), detect_s=0.01 * undisturbed)
    outcome = run_small("combo", 4, rounds=3, faults=faults)
    assert outcome.status == "finished" and len(outcome.results) == 4


@pytest.mark.parametrize(
    ("n", "config", "message"),
    [
        (4, {"replicas": 4}, "method.combo.replicas = 4: at most 3 with 4 workers"),
        (4, {"segments": 651, "model": LINEAR}, "method.combo.segments = 651: at most 650"),
    ],
)
def test_impossible_numbers_are_refused(n, config, message):
    with pytest.raises(ConfigError, match=message):
        METHOD.prepare(small_plan("combo", n, **config))
