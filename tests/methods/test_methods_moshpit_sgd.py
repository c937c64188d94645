"""Moshpit SGD: d rounds on a full grid are the exact mean; members who vanish cost one group one round."""

from __future__ import annotations

import pytest
import torch
from methods_reference import Scattered, batches, run, scatter, sgd, with_programs
from small import small_plan
from toy import Watcher, access

from edgefl.errors import ConfigError
from edgefl.keyed import generator
from edgefl.methods.decentralized.moshpit_sgd import METHOD, MoshpitConfig, next_key, peer, side, start_key
from edgefl.nodes.plan import Crash, FaultPlan, Partition
from edgefl.patterns.matchmaking import Group

STILL = {"learning_rate": 1e-30}
"""A rate at which a step changes no float32 value of these models."""
LINEAR = {"name": "linear"}
LINKS = access(1e6, latency_s=1e-4)


async def scattered(node):
    return await peer(Scattered(node))


def still_run(n, *, rounds, faults=None, watcher=None, links=LINKS, **config):
    """Moshpit that only mixes, from models that differ: the outcome, and the models that it started from."""
    plan = small_plan(
        "moshpit-sgd", n, rounds=rounds, train=STILL, model=LINEAR, access=links, faults=faults, **config
    )
    outcome = run(with_programs(plan, peer=scattered), watcher)
    size = plan.learner.model.layout.size
    return outcome, torch.stack([scatter(size, i) for i in range(n)])


def ended(outcome):
    return torch.stack([outcome.results[i].values for i in sorted(outcome.results)])


def test_one_peer_alone_is_sgd_bit_for_bit():
    plan = small_plan("moshpit-sgd", 1, rounds=4)
    assert torch.equal(run(plan).results[0].values, sgd(plan, batches(plan, 0, range(8))))


@pytest.mark.parametrize(("M", "d"), [(2, 1), (5, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("round_in_key", [False, True])
def test_a_full_grid_holds_the_mean_after_d_rounds_and_not_before(M, d, round_in_key):
    n = M**d
    more = {"dimensions": d, "group_size": M, "round_in_key": round_in_key}
    outcome, X = still_run(n, rounds=d, **more)
    mean = X.mean(0).expand_as(X)
    assert torch.allclose(ended(outcome), mean, rtol=0, atol=1e-5)
    if d > 1:
        before, _ = still_run(n, rounds=d - 1, **more)
        assert all((row - mean[0]).abs().max() > 0.1 for row in ended(before))


def test_several_group_rounds_may_follow_one_local_phase():
    outcome, X = still_run(9, rounds=1, group_rounds=2)
    assert torch.allclose(ended(outcome), X.mean(0).expand_as(X), rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [5, 7, 10])
def test_partly_filled_grids_keep_the_mean_of_all_peers(n):
    watcher = Watcher()
    outcome, X = still_run(n, rounds=4, watcher=watcher)
    for t in range(1, 5):
        models = [x.values for _, _, step, x in watcher.models if step == t]
        assert len(models) == n and torch.allclose(sum(models) / n, X.mean(0), rtol=0, atol=1e-5)
    assert (ended(outcome) - X.mean(0)).norm() < 0.6 * (X - X.mean(0)).norm()


def test_weighted_means_keep_the_mean_weighted_by_examples():
    plan = small_plan(
        "moshpit-sgd", 4, rounds=2, train=STILL, model=LINEAR, access=LINKS, weighting="samples",
        data={"name": "dirichlet", "alpha": 0.5, "min_examples": 8}, dimensions=1, group_size=4,
    )  # fmt: skip
    X = ended(run(with_programs(plan, peer=scattered)))
    sizes = torch.tensor([float(len(spec.data)) for spec in plan.nodes])
    start = torch.stack([scatter(plan.learner.model.layout.size, i) for i in range(4)])
    assert torch.allclose(X, ((sizes / sizes.sum()) @ start).expand_as(X), rtol=0, atol=1e-5)


def test_a_peer_that_finds_nobody_keeps_its_parameters():
    outcome, X = still_run(2, rounds=1, faults=FaultPlan(partitions=(Partition(frozenset({0}), 0.0, 1e3),)))
    assert torch.equal(ended(outcome), X)


def test_a_peer_that_finds_nobody_draws_its_newest_coordinate():
    """Three rounds alone: the oldest coordinate goes each time."""
    keys: dict[tuple[int, int], tuple[int, ...]] = {}

    class Ear(Scattered):
        def save(self, **state):
            keys[self.inner.id, state["round"]] = tuple(state["key"])
            return self.inner.save(**state)

    async def heard(node):
        return await peer(Ear(node))

    alone = FaultPlan(partitions=(Partition(frozenset({0}), 0.0, 1e3),))
    plan = small_plan(
        "moshpit-sgd", 2, rounds=3, train=STILL, model=LINEAR, access=LINKS, faults=alone,
        dimensions=3, group_size=16,
    )  # fmt: skip
    run(with_programs(plan, peer=heard))
    for i in range(2):
        drawn = [int(generator(1, "coordinate", i, t, 0).integers(16)) for t in range(3)]
        expected = [*start_key(i, 16, 3), *drawn]
        assert [keys[i, t + 1] for t in range(3)] == [tuple(expected[t + 1 : t + 3]) for t in range(3)]


@pytest.mark.parametrize("M", [3, 4])
def test_two_of_one_group_do_not_meet_in_the_next_d_minus_1_rounds(M):
    """On a full grid, keys alone: d = 3, four rounds, whatever the order of members in their groups."""
    d, n = 3, M**3
    keys = {i: start_key(i, M, d) for i in range(n)}
    met: list[set[frozenset[int]]] = []
    for t in range(4):
        pairs = set()
        before = dict(keys)
        for key in sorted(set(before.values())):
            members = [i for i in range(n) if before[i] == key]
            assert len(members) == M
            order = [int(i) for i in generator(0, "order", t, *key).permutation(members)]
            group_id = int(generator(0, "id", t, *key).integers(2**62))
            for place, i in enumerate(order):
                keys[i] = next_key(keys[i], Group(group_id, tuple(order), (), (), place, 0.0), M)
                pairs |= {frozenset((i, j)) for j in order if j != i}
        met.append(pairs)
    for t in range(4):
        assert all(not met[t] & later for later in met[t + 1 : t + d])


def test_places_of_a_partly_filled_group_are_distinct_and_spread_over_the_side():
    seen = set()
    for group_id in range(40):
        places = [next_key((0,), Group(group_id, (5, 6, 7), (), (), k, 0.0), 8)[0] for k in range(3)]
        assert len(set(places)) == 3
        seen |= set(places)
    assert seen == set(range(8))


def test_butterfly_traffic_of_equal_links_is_two_models_less_a_share():
    outcome, _ = still_run(9, rounds=2)
    bytes_by_kind = {}
    for (_, _, kind), row in outcome.traffic.table.items():
        bytes_by_kind[kind] = bytes_by_kind.get(kind, 0) + row[1]
    size = 4 * 650
    assert bytes_by_kind["Part"] == bytes_by_kind["Difference"] == 9 * 2 * size * 2 // 3
    assert set(bytes_by_kind.values()) == {0, 9 * 2 * size * 2 // 3}


def test_members_who_crash_mid_round_stop_nobody():
    """Whoever dies, whenever it does: the survivors make all their rounds and stay between the extremes."""
    undisturbed, X = still_run(9, rounds=4)
    for k in range(6):
        at_s = (k + 0.5) / 6 * undisturbed.time_s
        faults = FaultPlan(crashes=(Crash(k, at_s), Crash(k + 3, at_s)), detect_s=0.1 * undisturbed.time_s)
        watcher = Watcher()
        outcome, _ = still_run(9, rounds=4, faults=faults, watcher=watcher)
        assert outcome.status == "finished" and len(outcome.results) >= 7
        models = ended(outcome)
        assert (models <= X.amax(0) + 1e-5).all() and (models >= X.amin(0) - 1e-5).all()
        steps = {node: step for node, _, step, _ in watcher.models}
        assert all(steps[i] == 4 for i in outcome.results)


def test_absent_peers_neither_send_nor_change():
    outcome, X = still_run(4, rounds=1, absence=0.5, dimensions=1, group_size=4)
    absent = [i for i in range(4) if float(generator(1, "absent", i, 0).random()) < 0.5]
    present = [i for i in range(4) if i not in absent]
    assert absent and len(present) > 1
    models = {i: outcome.results[i].values for i in range(4)}
    assert all(torch.equal(models[i], X[i]) for i in absent)
    assert all(torch.allclose(models[i], X[present].mean(0), atol=1e-5) for i in present)


def test_the_grid_and_the_starting_keys():
    assert [start_key(i, 4, 3) for i in (0, 5, 63)] == [(0, 0), (1, 1), (3, 3)]
    sides = [side(n, MoshpitConfig(dimensions=d)) for n, d in ((16, 2), (17, 2), (27, 3), (3, 1))]
    assert sides == [4, 5, 3, 3]


@pytest.mark.parametrize(
    ("n", "config", "message"),
    [
        (17, {"group_size": 4}, "group_size = 4: at least 5 for 17 peers in 2 dimensions"),
        (4, {"group_size": 2, "min_group_size": 3}, "min_group_size = 3: at most 2"),
    ],
)
def test_impossible_grids_are_refused(n, config, message):
    with pytest.raises(ConfigError, match=message):
        METHOD.prepare(small_plan("moshpit-sgd", n, **config))
