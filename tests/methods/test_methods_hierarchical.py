"""Hierarchical FedAvg: FedAvg in its limits, exact nesting of means, and edges that come and go."""

from __future__ import annotations

import pytest
import torch
from methods_reference import Wrapped, run, with_programs
from small import run_small, small_plan
from toy import Watcher

from edgefl.data import Batch
from edgefl.errors import ConfigError
from edgefl.methods.federated.hierarchical_fedavg import attached, client
from edgefl.nodes.plan import Crash, FaultPlan

NAME = "hierarchical-fedavg"
UNEVEN = {"name": "dirichlet", "alpha": 0.5}


def test_roles_and_ids():
    plan = small_plan(NAME, 8, num_edges=2)
    assert [spec.role for spec in plan.nodes] == ["server", "edge", "edge", *["client"] * 8]
    assert [spec.data is None for spec in plan.nodes] == [True] * 3 + [False] * 8


def test_clients_of_an_edge_that_is_gone_go_to_the_others_and_back():
    clients, edges = tuple(range(3, 11)), (1, 2)
    assert attached(clients, edges, [1, 2]) == {1: (3, 4, 5, 6), 2: (7, 8, 9, 10)}
    assert attached(clients, edges, [2]) == {2: clients}
    three = attached(tuple(range(4, 10)), (1, 2, 3), [1, 3])
    assert three == {1: (4, 5, 6), 3: (7, 8, 9)}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_edges_of_four_clients_give_the_flat_weighted_average(momentum):
    """kappa2 = 1: FedAvg with kappa1 steps."""
    train = {"local_steps": 3, "momentum": momentum}
    tree = run(small_plan(NAME, 8, rounds=3, num_edges=2, edge_rounds=1, train=train, data=UNEVEN)).results[0]
    flat = run(small_plan("fedavg", 8, rounds=3, train=train, data=UNEVEN)).results[0]
    assert torch.allclose(tree.values, flat.values, rtol=1e-5, atol=1e-6)


def test_one_edge_is_kappa2_rounds_of_fedavg():
    tree = run(small_plan(NAME, 4, rounds=2, num_edges=1, edge_rounds=3, data=UNEVEN)).results[0]
    assert tree.equal(run(small_plan("fedavg", 4, rounds=6, data=UNEVEN)).results[0])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_client_per_edge_is_fedavg_with_all_the_steps(momentum):
    short, long = ({"local_steps": k, "momentum": momentum} for k in (2, 6))
    tree = run(small_plan(NAME, 4, rounds=2, num_edges=4, edge_rounds=3, train=short, data=UNEVEN)).results[0]
    assert tree.equal(run(small_plan("fedavg", 4, rounds=2, train=long, data=UNEVEN)).results[0])


def test_bytes_of_both_tiers():
    outcome = run_small(NAME, 6, rounds=2, num_edges=2, edge_rounds=3)
    d = outcome.results[0].layout.size
    tiers = {"CloudModel": 0, "EdgeReport": 0, "EdgeModel": 0, "LocalModel": 0}
    for (_, _, kind), (_, payload, _) in outcome.traffic.table.items():
        tiers[kind] += payload
    cloud, edge = 2 * 2 * 4 * d, 2 * 3 * 6 * 4 * d
    assert tiers == {"CloudModel": cloud, "EdgeReport": cloud, "EdgeModel": edge, "LocalModel": edge}


def test_a_lost_edge_costs_a_round_of_its_clients_and_they_go_to_another():
    one_s = run_small(NAME, 8, rounds=1, num_edges=2).time_s
    watcher = Watcher()
    faults = FaultPlan(crashes=(Crash(1, at_s=2.5 * one_s, down_s=3 * one_s),), detect_s=one_s / 50)
    outcome = run_small(NAME, 8, rounds=10, num_edges=2, faults=faults, watcher=watcher)
    assert outcome.status == "finished"
    reports = [m["reports"] for node, _, m in watcher.metrics if node == 0]
    assert reports[:2] == [2, 2] and reports[2] == 1 and reports[-1] == 2
    assert (
        outcome.traffic.table[2, 3, "EdgeModel"][0] > 0 and outcome.traffic.table[1, 3, "EdgeModel"][0] > 10
    )


def test_an_edge_without_living_clients_reports_nobody_and_the_round_goes_on():
    one_s = run_small(NAME, 4, rounds=1, num_edges=2).time_s
    crashes = tuple(Crash(k, at_s=1.5 * one_s) for k in (3, 4))
    faults = FaultPlan(crashes=crashes, detect_s=one_s / 50)
    outcome = run_small(NAME, 4, rounds=6, num_edges=2, faults=faults)
    assert outcome.status == "finished"
    assert outcome.traffic.table[1, 0, "EdgeReport"][0] == 6


def test_a_slow_edge_misses_the_clouds_deadline():
    one_s = run_small(NAME, 4, rounds=1, num_edges=2, edge_rounds=1).time_s
    watcher = Watcher()
    outcome = run_small(
        NAME, 4, rounds=4, num_edges=2, edge_rounds=1, slowdowns=[1, 1, 1, 1, 1, 1, 4],
        cloud_deadline_s=2 * one_s, watcher=watcher,
    )  # fmt: skip
    assert [m["reports"] for node, _, m in watcher.metrics if node == 0] == [1] * 4
    assert outcome.time_s == pytest.approx(8 * one_s)


def test_more_edges_than_clients_are_refused():
    plan = small_plan(NAME, 3, num_edges=4)
    with pytest.raises(ConfigError, match="num_edges = 4: at most 3"):
        plan.method.prepare(plan)


COMPRESS = [{"name": "top-k", "fraction": 0.02}, {"name": "qsgd"}]


@pytest.mark.parametrize("compress", COMPRESS, ids=["top-k", "qsgd"])
def test_compressed_both_tiers_send_less_and_the_model_learns(compress):
    losses = {}
    for name, table in (("plain", None), ("small", compress)):
        plan = small_plan(NAME, 6, rounds=15, data=UNEVEN, compress=table, train={"local_steps": 4})
        dataset = plan.nodes[3].data.dataset
        outcome, test = run(plan), Batch(dataset.x_test, dataset.y_test)
        losses[name] = plan.learner.measure(outcome.results[0], test).loss
    losses["start"] = plan.learner.measure(plan.learner.model.init(), test).loss
    assert losses["start"] - losses["small"] > 0.8 * (losses["start"] - losses["plain"])
    d = plan.learner.model.layout.size
    buckets = -(-d // 512)
    one = 8 * round(0.02 * d) if compress["name"] == "top-k" else 4 * buckets + -(-d * 4 // 8)
    table = outcome.traffic.table
    sizes = {kind: row[1] / row[0] for (_, _, kind), row in table.items() if kind != "Stop"}
    assert sizes == {"CloudModel": 4 * d, "EdgeModel": 4 * d, "LocalModel": one, "EdgeReport": one}


@pytest.mark.parametrize("edge_rounds", [1, 3])
def test_the_largest_entries_of_all_are_the_plain_run_to_rounding(edge_rounds):
    more = {"rounds": 3, "edge_rounds": edge_rounds, "data": UNEVEN}
    plain = run(small_plan(NAME, 4, **more)).results[0].values
    packed = run(small_plan(NAME, 4, compress={"name": "top-k", "fraction": 1.0}, **more)).results[0].values
    assert torch.allclose(packed, plain, rtol=0, atol=1e-5)


def test_clients_hear_which_of_their_reports_came_into_the_clouds_model():
    """Also those whose edge is lost in the middle, and who go on under another."""
    table = {"name": "top-k", "fraction": 0.02}
    one_s = run_small(NAME, 4, rounds=1, compress=table).time_s
    heard: dict[int, list[tuple[int, int]]] = {}

    class Ear(Wrapped):
        async def receive(self, *kinds, **fields):
            m = await self.inner.receive(*kinds, **fields)
            heard.setdefault(self.id, []).append((m.round, m.counted))
            return m

    async def listener(node):
        await client(Ear(node))

    faults = FaultPlan(crashes=(Crash(2, at_s=2.8 * one_s),), detect_s=one_s / 100)
    plan = small_plan(NAME, 4, rounds=6, compress=table, faults=faults)
    assert run(with_programs(plan, client=listener)).status == "finished"
    for k in (3, 4):  # under edge 1 all the while: each round counts
        assert [counted for _, counted in heard[k]] == [-1, *range(11)]
    for k in (5, 6):  # edge 2 dies in cloud round 2, of edge rounds 4 and 5: they are as if not made
        assert [counted for t, counted in heard[k] if t == 6] == [3]
        assert [counted for t, counted in heard[k] if t > 6] == list(range(6, 11))
