"""H-ADPSGD and the other mixings of sites: AD-PSGD whose workers are groups of learners with one model."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from effects import step_s
from methods_reference import (
    INSTANT,
    Recording,
    ScatteredModel,
    Wrapped,
    batches,
    run,
    scatter,
    sgd,
    union,
    with_programs,
)
from small import run_small, small_plan
from toy import Watcher, access

from edgefl.errors import ConfigError, ProgramFailed
from edgefl.learning.cost import duration_s
from edgefl.learning.work import Gradient
from edgefl.methods.decentralized import delay_by_one, h_adpsgd, h_ring_psgd
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.patterns.sites import Order

STILL = {"learning_rate": 1e-30}
"""A rate at which a step changes no float32 value of these models."""
LINEAR = {"name": "linear"}
UNEVEN = FaultPlan(compute_jitter=0.4)
LINKS = access(1e7, latency_s=1e-4, jitter=0.5)
PROGRAMS = {m.METHOD.name: m.learner for m in (h_adpsgd, h_ring_psgd, delay_by_one)}


class ScatteredSite(Wrapped):
    """A learner whose site starts elsewhere than all others."""

    @property
    def model(self):
        return ScatteredModel(self.inner.model, self.inner.id // self.inner.config.learners_per_site)


async def scattered(program, node):
    return await program(ScatteredSite(node))


def still_run(method, sites, G, *, rounds, **plan):
    """A method that only mixes, from sites that differ: the sites' models at the end and at the start."""
    plan = {"model": LINEAR, "access": LINKS, "learners_per_site": G} | plan
    made = small_plan(method, sites * G, rounds=rounds, train=STILL, **plan)
    outcome = run(with_programs(made, learner=partial(scattered, PROGRAMS[method])))
    size = made.learner.model.layout.size
    ended = torch.stack([outcome.results[m * G].values for m in range(sites)])
    return ended, torch.stack([scatter(size, m) for m in range(sites)])


@pytest.mark.parametrize("method", PROGRAMS)
def test_one_learner_is_sgd_bit_for_bit(method):
    plan = small_plan(method, 1, rounds=7, learners_per_site=1)
    assert torch.equal(run(plan).results[0].values, sgd(plan, batches(plan, 0, range(7))))


@pytest.mark.parametrize("method", PROGRAMS)
@pytest.mark.parametrize("G", [2, 3])
def test_one_site_is_sgd_with_the_batches_of_all_its_learners(method, G):
    plan = small_plan(method, G, rounds=6, learners_per_site=G, equal_shares=True, train={"batch_size": 8})
    large = [union(batches(plan, i, [k])[0] for i in range(G)) for k in range(6)]
    outcome = run(plan)
    for i in range(G):
        assert torch.allclose(outcome.results[i].values, sgd(plan, large), rtol=0, atol=1e-6)


@pytest.mark.parametrize("per_step", [1, 0])
def test_sites_of_one_learner_are_ad_psgd_event_for_event(per_step):
    traces = []
    for method, more in (("ad-psgd", {}), ("h-adpsgd", {"learners_per_site": 1})):
        watcher = Watcher()
        plan = {"rounds": 12, "faults": UNEVEN, "access": LINKS, "train": {"momentum": 0.5}}
        outcome = run_small(method, 6, exchanges_per_step=per_step, watcher=watcher, **plan, **more)
        models = [(n, t, k, v.values.numpy().tobytes()) for n, t, k, v in watcher.models]
        asked = {key: row for key, row in outcome.traffic.table.items() if key[2] in ("Ask", "Reply")}
        traces.append((models, watcher.metrics, asked))
    assert len(traces[0][0]) > 72 and traces[0] == traces[1]


class KeepsWork(Recording):
    """Keeps where each gradient was taken: by site and step."""

    def __init__(self, learner, G):
        super().__init__(learner)
        self.G, self.read = G, {}

    def run(self, works):
        for work in works:
            if isinstance(work, Gradient):
                self.read.setdefault((work.data.node // self.G, work.step), []).append(work.parameters)
        return super().run(works)


@pytest.mark.parametrize("method", PROGRAMS)
@pytest.mark.parametrize("G", [2, 4])
def test_a_sites_copies_are_bit_equal_whenever_a_gradient_is_taken(method, G):
    plan = small_plan(
        method, 8, rounds=15, learners_per_site=G, access=access(1e6, latency_s=1e-3, jitter=0.5),
        faults=UNEVEN, train={"momentum": 0.5},
    )  # fmt: skip
    kept = KeepsWork(plan.learner, G)
    outcome = run(plan, executor=kept)
    assert len(kept.read) == 15 * 8 // G
    for copies in kept.read.values():
        assert len(copies) == G and all(x.equal(copies[0]) for x in copies)
    for i, x in outcome.results.items():
        assert x.equal(outcome.results[i - i % G])


def test_orders_of_all_kinds_are_given():
    """The uplink is slow enough that exchanges stay open over a step, and end in another."""
    given = set()

    class Logs(Wrapped):
        def send(self, to, message, **more):
            if isinstance(message, Order):
                given.add((message.hold, message.parameters is not None))
            return self.inner.send(to, message, **more)

    async def logged(node):
        return await h_adpsgd.learner(Logs(node))

    plan = small_plan("h-adpsgd", 8, rounds=30, access=access(1e6, latency_s=1e-3, jitter=0.5), faults=UNEVEN)
    run(with_programs(plan, learner=logged))
    assert given == {(False, False), (False, True), (True, False), (True, True)}


@pytest.mark.parametrize("G", [1, 2])
@pytest.mark.parametrize("method", ["h-adpsgd", "h-ring-psgd", "delay-by-one"])
def test_mixing_alone_keeps_the_sum_of_the_sites_models(method, G):
    ended, X = still_run(method, 4, G, rounds=12, faults=UNEVEN)
    assert torch.allclose(ended.sum(0), X.sum(0), rtol=0, atol=1e-5)
    assert float((ended - ended.mean(0)).norm()) < 0.5 * float((X - X.mean(0)).norm())


def ring_matrix(order):
    M = len(order)
    T = torch.zeros(M, M, dtype=torch.float64)
    for place, m in enumerate(order):
        row = {m, order[place - 1], order[(place + 1) % M]}
        for j in row:
            T[m, j] = 1 / len(row)
    return T


@pytest.mark.parametrize("sites", [2, 3, 5])
def test_the_fixed_ring_is_a_symmetric_doubly_stochastic_matrix(sites):
    T = ring_matrix(range(sites))
    assert torch.equal(T, T.T) and torch.allclose(T.sum(0), torch.ones(sites, dtype=torch.float64))
    ended, X = still_run("h-ring-psgd", sites, 2, rounds=3)
    assert torch.allclose(ended.double(), T @ T @ T @ X.double(), rtol=0, atol=1e-5)


def test_the_random_ring_is_a_new_permutation_every_step():
    ended, X = still_run("h-ring-psgd", 5, 1, rounds=2, ring="random")
    plan = small_plan("h-ring-psgd", 5, learners_per_site=1)
    orders = []

    async def notes(node):
        orders.append([[int(s) for s in node.shared_rng("ring", k).permutation(5)] for k in range(2)])

    run(with_programs(plan, learner=notes))
    assert all(order == orders[0] for order in orders) and orders[0][0] != orders[0][1]
    first, second = (ring_matrix(order) for order in orders[0])
    assert torch.allclose(ended.double(), second @ first @ X.double(), rtol=0, atol=1e-5)


def test_the_newest_models_are_mixed_by_rows_that_sum_to_one():
    """Without waiting: what all sites agree on stays, and nobody leaves the range of the start."""
    ended, X = still_run("h-ring-psgd", 4, 1, rounds=20, wait="newest", faults=UNEVEN)
    assert (ended <= X.amax(0) + 1e-5).all() and (ended >= X.amin(0) - 1e-5).all()
    plan = small_plan(
        "h-ring-psgd", 4, rounds=20, train=STILL, learners_per_site=1, wait="newest", access=LINKS
    )
    start = plan.learner.model.init()
    assert all(torch.allclose(x.values, start.values, rtol=0, atol=1e-6) for x in run(plan).results.values())


def test_delay_by_one_holds_the_mean_after_one_step():
    ended, X = still_run("delay-by-one", 5, 2, rounds=1)
    assert torch.allclose(ended, X.mean(0).expand_as(X), rtol=0, atol=1e-6)


def payload(outcome, *kinds):
    return sum(row[1] for (_, _, kind), row in outcome.traffic.table.items() if kind in kinds)


def count(outcome, kind):
    return sum(row[0] for (_, _, k), row in outcome.traffic.table.items() if k == kind)


@pytest.mark.parametrize("G", [1, 2, 4])
def test_gradients_stay_on_the_local_network_and_an_exchange_costs_two_models(G):
    steps = 12
    outcome = run_small("h-adpsgd", 8, rounds=steps, learners_per_site=G, model=LINEAR)
    d = 4 * 650
    assert payload(outcome, "Chunk") == steps * 8 * 2 * (G - 1) * d // G
    exchanges = count(outcome, "Reply")
    assert count(outcome, "Ask") == exchanges > 0 and payload(outcome, "Ask", "Reply") == 2 * d * exchanges
    assert payload(outcome, "Order", "End") % d == 0 and payload(outcome, "Sync") == 0
    table = outcome.traffic.table
    between = {kind for i, j, kind in table if i // G != j // G}
    assert between <= {"Ask", "Reply", "Finished", "Leaving"}


@pytest.mark.parametrize("G", [2, 4])
def test_an_order_with_the_heads_model_costs_a_model_to_each_other_learner(G):
    sent = []

    class Logs(Wrapped):
        def send(self, to, message, **more):
            if isinstance(message, Order):
                sent.append((len(to), message.parameters is not None))
            return self.inner.send(to, message, **more)

    async def logged(node):
        return await h_adpsgd.learner(Logs(node))

    plan = small_plan("h-adpsgd", 8, rounds=12, learners_per_site=G, model=LINEAR, faults=UNEVEN)
    outcome = run(with_programs(plan, learner=logged))
    with_model = sum(has_model for _, has_model in sent)
    assert {to for to, _ in sent} == {G - 1} and len(sent) == 12 * 8 // G
    assert 0 < with_model <= 2 * count(outcome, "Reply")
    assert payload(outcome, "Order") == with_model * (G - 1) * 4 * 650


@pytest.mark.parametrize("G", [1, 2, 4])
def test_delay_by_one_sends_models_and_gradients_and_not_a_value_more(G):
    """Rings of the heads and within sites, and from each head its model to the others of its site."""
    steps, sites, d = 12, 8 // G, 4 * 650
    outcome = run_small("delay-by-one", 8, rounds=steps, learners_per_site=G, model=LINEAR)
    rings = 2 * (sites - 1) * d + sites * 2 * (G - 1) * d
    assert payload(outcome, "Chunk") == steps * rings
    assert outcome.traffic.payload_bytes == steps * (rings + sites * (G - 1) * d)


@pytest.mark.parametrize(("step_per_round_trip", "hidden"), [(1.2, True), (0.35, False)])
def test_exchanges_are_hidden_where_their_round_trip_is_below_a_step(step_per_round_trip, hidden):
    """4,810 values at 20 Mb/s and 20 ms one way are there and back in 55 ms."""
    round_trip_s = 2 * (0.02 + 4 * 4810 * 8 / 20e6)
    plan = {"rounds": 11, "learners_per_site": 1, "model": {"name": "mlp", "hidden": [64]}}
    plan |= {"equal_shares": True, "access": access(20e6 / 8, latency_s=0.01)}
    one, watcher = step_per_round_trip * round_trip_s, Watcher()
    slower = one / step_s(small_plan("h-adpsgd", 2, **plan), 0)
    run_small("h-adpsgd", 2, slowdowns=[slower] * 2, watcher=watcher, **plan)
    assert round_trip_s == pytest.approx(0.0554, abs=1e-4)
    last = {i: min(t for node, t, step, _ in watcher.models if node == i and step == 11) for i in (0, 1)}
    assert last[0] == pytest.approx(11 * one, rel=1e-6)
    # else an active makes its first step, then two in each exchange
    assert last[1] == pytest.approx(11 * one if hidden else one + 5 * round_trip_s, rel=0.01)


def gradients_per_step_time(method, slow, **config):
    """Mini-batches done in the time of 200 fast steps, over 200; one of 8 learners is `slow` times slower."""
    n = 8
    plan = small_plan(
        method, n, rounds=None, model=LINEAR, access=INSTANT, slowdowns=[slow] + [1] * (n - 1),
        equal_shares=True, train={"batch_size": 179}, **config,
    )  # fmt: skip
    work = Gradient(plan.learner.model.init(), plan.nodes[0].data, 0, plan.nodes[0].workload)
    fast_s = duration_s(work.cost(plan.learner), plan.nodes[0].profile)
    watcher = Watcher()
    run(dataclasses.replace(plan, time_s=200 * fast_s), watcher)
    return sum(1 for _, _, m in watcher.metrics if "train_loss" in m) / 200


@pytest.mark.parametrize(
    ("method", "rate", "config"),
    [
        ("h-adpsgd", 8 - 2 + 2 / 5, {"learners_per_site": 2}),
        ("ad-psgd", 8 - 1 + 1 / 5, {}),
        ("ring-allreduce", 8 / 5, {}),
        ("h-ring-psgd", 8 / 5, {"learners_per_site": 2}),
        ("delay-by-one", 8 / 5, {"learners_per_site": 2}),
    ],
)
def test_a_straggler_slows_its_own_site_only(method, rate, config):
    assert gradients_per_step_time(method, 5, **config) == pytest.approx(rate, rel=0.05)


def test_a_step_takes_as_long_as_its_slowest_learner_and_the_local_all_reduce():
    """One site of two: half a model twice each way, and an order that overlaps with the last of it."""
    rate = 1e6
    plan = small_plan(
        "h-adpsgd", 2, rounds=10, model=LINEAR, access=access(rate, latency_s=1e-3), slowdowns=[1, 3]
    )
    work = Gradient(plan.learner.model.init(), plan.nodes[0].data, 0, plan.nodes[0].workload)
    compute_s = 3 * duration_s(work.cost(plan.learner), plan.nodes[0].profile)
    reduce_s = 2 * (4 * 325 / rate + 2e-3)
    order_s = 2e-3
    per_step = run(plan).time_s / 10
    assert compute_s + reduce_s <= per_step <= compute_s + reduce_s + order_s


# --- losses ------------------------------------------------------------------------------------------------


SITES_OF_FOUR = {
    "rounds": 20,
    "learners_per_site": 4,
    "access": LINKS,
    "faults": UNEVEN,
    "train": {"momentum": 0.5},
}


def crashing(plan, crashes, watcher=None, whole_s=1.0):
    faults = FaultPlan(crashes=tuple(crashes), detect_s=0.01 * whole_s, compute_jitter=0.4)
    return run_small("h-adpsgd", 8, watcher=watcher, **plan | {"faults": faults})


@pytest.mark.parametrize("dead", [(1,), (0,), (0, 1), (2,), (3,), (2, 5)])
@pytest.mark.parametrize("share", [0.05, 0.4, 0.85, 0.99])
def test_a_site_goes_on_with_its_survivors_from_one_model(dead, share):
    whole_s = run_small("h-adpsgd", 8, **SITES_OF_FOUR).time_s
    crashes = [Crash(j, share * whole_s * (1 + 0.01 * k)) for k, j in enumerate(dead)]
    watcher = Watcher()
    outcome = crashing(SITES_OF_FOUR, crashes, watcher, whole_s)
    assert outcome.status == "finished"
    survivors = [i for i in range(8) if i not in dead]
    assert set(survivors) <= set(outcome.results)
    steps = {node: step for node, _, step, _ in watcher.models}
    assert all(steps[i] == 20 for i in survivors)
    for site in (0, 1):
        models = [outcome.results[i] for i in survivors if i // 4 == site]
        assert all(x.equal(models[0]) for x in models)


def test_the_survivors_take_the_mean_over_themselves():
    """One site; a learner is gone before it begins: SGD on the batches of the other two."""
    faults = FaultPlan(crashes=(Crash(1, 0.0),), detect_s=1e-9)
    plan = small_plan(
        "h-adpsgd",
        3,
        rounds=5,
        learners_per_site=3,
        equal_shares=True,
        faults=faults,
        train={"batch_size": 8},
    )
    outcome = run(plan)
    large = [union(batches(plan, i, [k])[0] for i in (0, 2)) for k in range(5)]
    for i in (0, 2):
        assert torch.allclose(outcome.results[i].values, sgd(plan, large), rtol=0, atol=1e-6)


@pytest.mark.parametrize("away", [(1,), (0,), (0, 1), (5, 6), (0, 1, 2, 3), (4, 7, 1)])
@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("down", [0.001, 0.05, 0.2])
def test_who_returns_is_taken_in_again_and_ends_with_its_sites_model(away, share, down):
    """Also a head, also a whole site, and whether or not anybody has noticed."""
    whole_s = run_small("h-adpsgd", 8, **SITES_OF_FOUR).time_s
    crashes = [Crash(j, share * whole_s * (1 + 0.01 * k), down * whole_s) for k, j in enumerate(away)]
    watcher = Watcher()
    outcome = crashing(SITES_OF_FOUR, crashes, watcher, whole_s)
    assert outcome.status == "finished" and set(outcome.results) == set(range(8))
    steps = {node: step for node, _, step, _ in watcher.models}
    assert steps == dict.fromkeys(range(8), 20)
    for site in (0, 1):
        models = [outcome.results[i] for i in range(4 * site, 4 * site + 4)]
        assert all(x.equal(models[0]) for x in models)
    if share == 0.1:  # after two gradients; later a site may have made its steps when somebody returns
        trained = [sum(n == i and "train_loss" in m for n, _, m in watcher.metrics) for i in away]
        assert min(trained) >= 8


def test_sites_of_one_learner_return_as_in_ad_psgd():
    """A passive and an active are away for a while: the same models at the same times."""
    traces = []
    for method, more in (("ad-psgd", {}), ("h-adpsgd", {"learners_per_site": 1})):
        plan = {"rounds": 30, "access": LINKS, "train": {"momentum": 0.5}}
        whole_s = run_small(method, 6, **plan, faults=UNEVEN, **more).time_s
        crashes = (Crash(1, 0.2 * whole_s, 0.1 * whole_s), Crash(2, 0.4 * whole_s, 0.1 * whole_s))
        faults = FaultPlan(crashes=crashes, detect_s=0.01 * whole_s, compute_jitter=0.4)
        watcher = Watcher()
        run_small(method, 6, watcher=watcher, **plan, faults=faults, **more)
        traces.append([(n, t, k, v.values.numpy().tobytes()) for n, t, k, v in watcher.models])
    assert len(traces[0]) > 180 and traces[0] == traces[1]


@pytest.mark.parametrize("wait", ["lockstep", "newest"])
@pytest.mark.parametrize("G", [1, 2])
def test_a_ring_stops_with_a_learner(G, wait):
    faults = FaultPlan(crashes=(Crash(0, at_s=2e-3),), detect_s=1e-3)
    with pytest.raises(ProgramFailed, match="node 0 is gone"):
        run_small("h-ring-psgd", 4 * G, rounds=30, learners_per_site=G, wait=wait, faults=faults)


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "plan", "message"),
    [
        (6, {"learners_per_site": 4}, "h-adpsgd.learners_per_site = 4: a divisor of 6"),
        (4, {"train": {"momentum": 0.9, "weight_decay": 0.1}}, "train.weight_decay = 0.1: 0"),
        (4, {"train": {"optimizer": "adam", "weight_decay": 0.1}}, "train.weight_decay = 0.1: 0"),
    ],
)
def test_impossible_fleets_and_optimisers_are_refused(n, plan, message):
    with pytest.raises(ConfigError, match=message):
        h_adpsgd.METHOD.prepare(small_plan("h-adpsgd", n, **plan))


def test_a_random_ring_waits():
    with pytest.raises(ConfigError, match=r"h-ring-psgd.wait = 'newest': lockstep"):
        h_ring_psgd.METHOD.prepare(small_plan("h-ring-psgd", 4, ring="random", wait="newest"))
