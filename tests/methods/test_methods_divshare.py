"""DivShare: fragments that cover the model, averages over what arrived, and links that never fall behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methods_reference import INSTANT, Wrapped, batches, run, scatter, sgd, start, with_programs
from small import small_plan
from toy import Watcher, access, run_toy

from edgefl.errors import ConfigError
from edgefl.learning.work import LocalSGD
from edgefl.methods.decentralized.divshare import (
    DivShareConfig,
    Fragment,
    aggregate,
    fresh_queue,
    index_sets,
    num_fragments,
    peer,
)
from edgefl.parameters import Layout, Vector

LAYOUT = Layout.of_shapes([("a", (7, 9)), ("b", (9,)), ("c", (3,)), ("d", (40,))])
SIZE = 7 * 9 + 9 + 3 + 40


def sets(K, seed=0):
    return index_sets(LAYOUT, K, np.random.default_rng(seed))


@pytest.mark.parametrize("K", [1, 2, 5, 10])
def test_index_sets_are_disjoint_and_cover_the_vector(K):
    S = sets(K)
    assert len(S) == K and sorted(torch.cat(S).tolist()) == list(range(SIZE))


def test_each_fragment_holds_its_share_of_every_tensor():
    S = sets(10)
    of_the_largest = [int((S_j < 63).sum()) for S_j in S]
    of_the_smallest = [int(((S_j >= 72) & (S_j < 75)).sum()) for S_j in S]
    assert of_the_largest == [6] * 9 + [9] and of_the_smallest == [0] * 9 + [3]


@pytest.mark.parametrize(("fraction", "K"), [(1.0, 1), (0.6, 1), (0.5, 2), (0.1, 10), (1 / 3, 3), (0.3, 3)])
def test_the_number_of_fragments(fraction, K):
    assert num_fragments(DivShareConfig(fragment_fraction=fraction)) == K


def fragment(sender, j, values):
    return Fragment(j, 0, values).stamped(sender, 0)


def test_each_coordinate_is_divided_by_what_it_got():
    """From A fragments 0 and 1, from B fragment 1: thirds on S_1, halves on S_0, the rest as it was."""
    S = sets(4)
    x, a, b = (Vector(LAYOUT, scatter(SIZE, k)) for k in range(3))
    got = [fragment(2, 1, b[S[1]]), fragment(1, 0, a[S[0]]), fragment(1, 1, a[S[1]])]
    mean = aggregate(x, got, S)
    assert torch.allclose(mean[S[0]], (x[S[0]] + a[S[0]]) / 2, atol=1e-6)
    assert torch.allclose(mean[S[1]], (x[S[1]] + a[S[1]] + b[S[1]]) / 3, atol=1e-6)
    assert torch.equal(mean[S[2]], x[S[2]]) and torch.equal(mean[S[3]], x[S[3]])
    assert aggregate(x, got[::-1], S).equal(mean) and aggregate(x, [], S) is x


def test_the_mean_of_fragments_lies_between_them():
    S = sets(3)
    x, a, b = (Vector(LAYOUT, torch.full((SIZE,), value)) for value in (-1.0, 0.5, 4.0))
    got = [fragment(k, j, v[S[j]]) for k, v in ((1, a), (2, b)) for j in range(3)]
    assert torch.allclose(aggregate(x, got, S).values, torch.full((SIZE,), 3.5 / 3))


async def sends_fragments(node):
    for j, iteration in ((0, 0), (1, 0), (0, 1)):
        await node.send(1, Fragment(j, iteration, torch.full((3,), float(iteration))))


async def takes_fragments(node):
    await node.sleep(1.0)
    return [(m.fragment, m.iteration) for m in node.take(Fragment)]


def test_a_newer_fragment_of_the_same_sender_and_number_replaces_the_older_one():
    outcome = run_toy([sends_fragments, takes_fragments], (Fragment,), ends_with=[1])
    assert sorted(outcome.results[1]) == [(0, 1), (1, 0)]


async def sent_in_turn(node, queue):
    for to, message in queue:
        await node.send(to, message)


async def with_barriers(node):
    """DivShare with a wait for all fragments before each average, and for all averages after it."""
    S = index_sets(node.model.layout, num_fragments(node.config), node.shared_rng("divshare fragments"))
    others = [j for j in node.fleet.ids() if j != node.id]
    x = node.model.init()
    for it in node.rounds():
        r = await node.compute(LocalSGD(x, node.data, it, node.workload))
        sending = node.start(sent_in_turn(node, fresh_queue(node, S, r.parameters, it)))
        got = [await node.receive(Fragment, iteration=it) for _ in range(len(others) * len(S))]
        await sending
        x = aggregate(r.parameters, got, S)
        node.publish(x, step=it + 1)
    return x


@pytest.mark.parametrize("fraction", [1.0, 0.3, 0.1])
def test_with_barriers_and_all_recipients_it_is_fedavg_with_equal_weights(fraction):
    config = {"fragment_fraction": fraction, "recipients": 4}
    plan = small_plan("divshare", 5, rounds=4, equal_shares=True, **config)
    outcome = run(with_programs(plan, peer=with_barriers))
    x = start(plan)
    for t in range(4):
        x = sum(sgd(plan, batches(plan, i, [2 * t, 2 * t + 1]), x) for i in range(5)) / 5
    for i in range(5):
        assert float((outcome.results[i].values - x).abs().max()) <= 1e-6


def test_one_node_is_sgd():
    plan = small_plan("divshare", 1, rounds=5)
    assert torch.equal(run(plan).results[0].values, sgd(plan, batches(plan, 0, range(10))))


def test_a_link_that_empties_its_queue_carries_four_bytes_per_recipient_and_value():
    """Four of five iterations: what the last one queues ends with the program."""
    plan = small_plan("divshare", 6, rounds=5, access=INSTANT, recipients=3)
    outcome = run(plan)
    assert outcome.traffic.messages == 4 * 6 * 10 * 3
    assert outcome.traffic.payload_bytes == 4 * 6 * 4 * 3 * plan.learner.model.layout.size


async def queue_of(node):
    """The out-queue of iteration 4, as pairs of recipient and fragment number."""
    S = index_sets(node.model.layout, num_fragments(node.config), node.shared_rng("divshare fragments"))
    queue = fresh_queue(node, S, node.model.init(), 4)
    return [(to, m.fragment) for to, m in queue], [S_j.tolist() for S_j in S]


def test_the_queue_holds_each_fragment_for_its_own_distinct_recipients():
    plan = with_programs(small_plan("divshare", 6, recipients=3, fragment_fraction=0.2), peer=queue_of)
    results = run(plan).results
    for i in range(6):
        queue, S = results[i]
        assert len(queue) == len(set(queue)) == 5 * 3 and i not in {to for to, _ in queue}
        assert [sum(j == k for _, k in queue) for j in range(5)] == [3] * 5
        assert results[0][1] == S
    recipients = {tuple(sorted(to for to, k in results[0][0] if k == j)) for j in range(5)}
    assert len(recipients) > 1 and results[0][0] != sorted(results[0][0])


def test_a_slow_uplink_sends_what_it_can_and_the_queue_does_not_grow():
    slow = access(2e5, 1e9)
    plan = small_plan("divshare", 4, rounds=None, time_s=0.1, access=[slow] + [access(1e9)] * 3, recipients=2)
    watcher = Watcher()
    outcome = run(plan, watcher)
    left = sum(row[2] for (sender, _, _), row in outcome.traffic.table.items() if sender == 0)
    one = max(row[2] / row[0] for row in outcome.traffic.table.values())
    assert 0.1 * 2e5 - one <= left <= 0.1 * 2e5 + one
    queued = [m["queued"] for node, _, m in watcher.metrics if node == 0]
    assert max(queued) <= 10 * 2 and queued[-1] > 0
    newest = [step for node, _, step, _ in watcher.models if node == 0]
    assert newest[-1] > 50  # training went on all the while


def test_peers_that_only_mix_agree():
    """No training and models that differ: the spread vanishes, within the hull of what they began with."""
    plan = small_plan("divshare", 6, rounds=40, recipients=3, train={"learning_rate": 1e-30})

    async def apart(node):
        return await peer(Apart(node))

    outcome = run(with_programs(plan, peer=apart))
    X = torch.stack([outcome.results[i].values for i in range(6)])
    assert float((X.max(0).values - X.min(0).values).max()) < 1e-3
    assert float(X.min()) >= 0.0 and float(X.max()) <= 5.0


class ConstantModel(Wrapped):
    def __init__(self, inner, value):
        super().__init__(inner)
        self.value = value

    def init(self):
        x = self.inner.init()
        return x.with_values(torch.full_like(x.values, self.value))


class Apart(Wrapped):
    """A node whose model starts at its own id in all coordinates."""

    @property
    def model(self):
        return ConstantModel(self.inner.model, float(self.inner.id))


def test_impossible_settings_are_refused():
    def refused(**config):
        plan = small_plan("divshare", 4, **config)
        with pytest.raises(ConfigError) as caught:
            plan.method.prepare(plan)
        return str(caught.value)

    assert refused(recipients=4) == "method.divshare.recipients = 4: at most 3 with 4 nodes"
    assert "method.divshare.fragment_fraction = 1e-05" in refused(recipients=2, fragment_fraction=1e-5)
