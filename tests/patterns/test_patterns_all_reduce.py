"""The ring all-reduce: sums, bytes, time and departures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from toy import access, run_toy

from edgefl.errors import PeerGone
from edgefl.nodes import Message
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.parameters import BufferSpec, Layout, Vector
from edgefl.patterns.all_reduce import CalledOff, Chunk, all_reduce_mean, chunk_bounds, ring_all_reduce
from edgefl.runtimes.outcome import Outcome

SIZES = (1, 2, 7, 10, 64, 101)
KINDS: tuple[type[Message], ...] = (Chunk,)


async def reduce(values, members, node):
    return await ring_all_reduce(node, members, values[node.id], tag=0)


def reduced(values, members=None, **plan) -> Outcome:
    members = list(range(len(values))) if members is None else members
    return run_toy([partial(reduce, values, members)] * len(values), KINDS, **plan)


def drawn(n, size):
    rng = np.random.default_rng([n, size])
    return [torch.from_numpy(rng.normal(size=size).astype(np.float32)) for _ in range(n)]


@pytest.mark.parametrize("n", range(2, 17))
def test_all_members_get_the_sum_bit_equal(n):
    for size in SIZES:
        values = drawn(n, size)
        results = reduced(values).results
        assert all(torch.equal(results[i], results[0]) for i in range(n))
        assert torch.allclose(results[0], torch.stack(values).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", range(2, 17))
def test_small_integers_are_summed_exactly(n):
    values = [torch.arange(37.0) * (i + 1) for i in range(n)]
    assert torch.equal(reduced(values).results[0], torch.stack(values).sum(0))


def test_two_members_add_in_either_order_bit_for_bit():
    a, b = drawn(2, 33)
    assert torch.equal(reduced([a, b]).results[0], a + b)


@pytest.mark.parametrize("n", range(2, 17))
def test_bytes_are_exact_for_each_member_and_together(n):
    for d in SIZES:
        traffic = reduced(drawn(n, d)).traffic
        chunk = [end - begin for begin, end in chunk_bounds(d, n)]
        for i in range(n):
            sent = traffic.table[i, (i + 1) % n, "Chunk"]
            assert sent[:2] == [2 * (n - 1), 4 * (2 * d - chunk[(i + 1) % n] - chunk[(i + 2) % n])]
        assert traffic.payload_bytes == 8 * (n - 1) * d


def test_chunks_differ_by_one_at_most_and_cover_the_vector():
    for d in SIZES:
        for n in range(1, 17):
            bounds = chunk_bounds(d, n)
            sizes = [end - begin for begin, end in bounds]
            assert sum(sizes) == d and max(sizes) - min(sizes) <= 1 and bounds[0][0] == 0


def test_one_member_sends_nothing_and_gets_its_own():
    (x,) = drawn(1, 5)
    outcome = reduced([x])
    assert torch.equal(outcome.results[0], x) and outcome.traffic.messages == 0


def test_members_in_any_order_and_the_inputs_stay():
    values = drawn(5, 12)
    kept = [v.clone() for v in values]
    results = reduced(values, members=[3, 0, 4, 1, 2]).results
    assert torch.allclose(results[0], torch.stack(values).sum(0), atol=1e-5)
    assert all(map(torch.equal, values, kept))


def test_time_is_two_n_minus_one_steps_of_latency_and_a_chunk():
    n, d, rate, latency_s = 4, 40_000, 1e6, 0.01
    outcome = reduced(drawn(n, d), access=access(rate, latency_s=latency_s / 2))
    assert outcome.time_s == pytest.approx(2 * (n - 1) * (latency_s + 4 * d / n / rate), rel=0.01)


async def mean_of(vectors, weights, node):
    members = list(range(len(vectors)))
    return await all_reduce_mean(node, members, vectors[node.id], weight=weights[node.id], tag=7)


def test_the_weighted_mean_takes_float_buffers_along_and_leaves_counters():
    layout = Layout.of_shapes(
        [("a", (3,))], [BufferSpec("mean", (2,), torch.float32), BufferSpec("count", (), torch.int64)]
    )
    vectors = [
        Vector(layout, torch.full((3,), float(i)), (torch.full((2,), 10.0 * i), torch.tensor(i)))
        for i in range(3)
    ]
    results = run_toy([partial(mean_of, vectors, [1.0, 2.0, 5.0])] * 3, KINDS).results
    for i in range(3):
        assert results[i].values.tolist() == [1.5] * 3
        assert results[i].buffers[0].tolist() == [15.0] * 2 and results[i].buffers[1] == i


def test_a_group_of_one_keeps_its_vector_and_no_weight_is_refused():
    x = Vector(Layout.of_shapes([("a", (3,))]), torch.tensor([0.1, 0.2, 0.3]))
    assert run_toy([partial(mean_of, [x], [0.3])], KINDS).results[0] is x

    async def refused(node):
        with pytest.raises(ValueError, match="sum to zero"):
            await mean_of([x, x], [0.0, 0.0], node)
        return "refused"

    assert run_toy([refused] * 2, KINDS).results == {0: "refused", 1: "refused"}


def test_the_member_after_a_departure_is_told():
    async def program(node):
        if node.id == 1:
            await node.sleep(100.0)
        try:
            await ring_all_reduce(node, [0, 1, 2], torch.ones(5), tag=0)
        except PeerGone as gone:
            return gone.node

    faults = FaultPlan(crashes=(Crash(1, at_s=1.0),), detect_s=0.5)
    outcome = run_toy([program] * 3, KINDS, faults=faults, ends_with=[2])
    assert outcome.results[2] == 1 and outcome.time_s == 1.5


def test_equal_weights_send_nothing_but_the_values():
    layout = Layout.of_shapes([("a", (10,))])
    vectors = [Vector(layout, torch.arange(10.0) * i) for i in range(4)]
    outcome = run_toy([partial(mean_of, vectors, [None] * 4)] * 4, KINDS)
    assert all(torch.equal(outcome.results[i].values, torch.arange(10.0) * 1.5) for i in range(4))
    assert outcome.traffic.payload_bytes == 2 * 3 * 4 * 10


@dataclass(frozen=True)
class Off(Message):
    tag: int


def test_an_operation_is_called_off_by_a_message_of_its_own_tag():
    async def member(node):
        off = (node.receive(Off, sender=2, tag=5),)
        try:
            return await ring_all_reduce(node, [0, 1, 3], torch.ones(3), tag=5, unless=off)
        except CalledOff as off:
            return off.message.sender, node.now()

    async def caller(node):
        node.send([0, 1], Off(4))
        await node.sleep(2.0)
        node.send([0, 1], Off(5))

    async def absent(node):
        await node.sleep(9.0)

    results = run_toy([member, member, caller, absent], (Chunk, Off)).results
    for i in (0, 1):
        assert results[i] == (2, pytest.approx(2.0, abs=1e-3))
