"""[compress]: what is not sent is not lost, what does not count goes back, bytes are what they should be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from edgefl.keyed import generator
from edgefl.parameters import BufferSpec, Layout, Vector
from edgefl.parameters.compress import CompressConfig
from edgefl.patterns.compression import Uplink, opened

LAYOUT = Layout.of_shapes([("a", (40,)), ("b", (60,))])


class Stub:
    """As much of a node as an uplink asks for."""

    def __init__(self, saved=None, **compress):
        self.compress, self.saved = CompressConfig(**compress), saved

    def rng(self, purpose, *key):
        return generator(0, purpose, *key)

    async def save(self, **state):
        self.saved = state


def changes(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [Vector(LAYOUT, torch.randn(100, generator=rng)) for _ in range(count)]


def drive(coroutine):
    with pytest.raises(StopIteration):
        coroutine.send(None)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 1.0])
def test_all_that_was_sent_and_the_memory_are_all_changes(fraction):
    node = Stub(name="top-k", fraction=fraction)
    uplink, sent = Uplink(node), torch.zeros(100)
    made = changes(30)
    for t, change in enumerate(made):
        uplink.settle(t - 1)
        sent += opened(node, uplink.change(change, t), LAYOUT).values
        total = sum(c.values for c in made[: t + 1])
        assert torch.allclose(sent + uplink.memory, total, rtol=0, atol=1e-5)
        assert (fraction < 1) or not uplink.memory.any()


def test_what_a_sub_model_did_not_send_waits_for_an_update_of_that_place():
    """Also where masks change: sent and kept are all changes, coordinate by coordinate."""
    node = Stub(name="top-k", fraction=0.1)
    node.model = SimpleNamespace(layout=LAYOUT)
    uplink, sent, total = Uplink(node), torch.zeros(100), torch.zeros(100)
    rng = torch.Generator().manual_seed(1)
    for t in range(30):
        index = torch.randperm(100, generator=rng)[:60].sort().values
        layout = Layout.of_shapes([("part", (60,))])
        change = Vector(layout, torch.randn(60, generator=rng))
        before = None if uplink.memory is None else uplink.memory.clone()
        uplink.settle(t - 1)
        sent[index] += opened(node, uplink.change(change, t, index), layout).values
        total[index] += change.values
        assert torch.allclose(sent + uplink.memory, total, rtol=0, atol=1e-5)
        outside = torch.ones(100, dtype=torch.bool)
        outside[index] = False
        assert before is None or torch.equal(uplink.memory[outside], before[outside])


def test_what_did_not_count_comes_again():
    """Three updates that nobody took, and a fourth that is sent whole: nothing is lost."""
    made = changes(4)
    node = Stub(name="top-k", fraction=0.1)
    uplink = Uplink(node)
    for t in range(3):
        uplink.settle(-1)
        uplink.change(made[t], t)
    node.compress = CompressConfig(name="top-k", fraction=1.0)
    uplink.settle(-1)
    last = opened(node, uplink.change(made[3], 3), LAYOUT).values
    assert torch.allclose(last, sum(c.values for c in made), rtol=0, atol=1e-5)


def test_the_memory_outlives_a_crash_and_knows_what_counted():
    made = changes(3)
    for counted in (-1, 0):
        node = Stub(name="top-k", fraction=0.1)
        uplink = Uplink(node)
        uplink.change(made[0], 0)
        drive(uplink.save())
        again = Uplink(node)
        for one in (uplink, again):
            one.settle(counted)
        assert torch.equal(uplink.memory, again.memory)
        assert torch.equal(again.memory, made[0].values) == (counted == -1)


def test_a_change_that_is_no_number_is_not_remembered():
    node = Stub(name="top-k", fraction=0.1)
    uplink = Uplink(node)
    uplink.change(changes(1)[0].with_values(torch.full((100,), torch.nan)), 0)
    uplink.settle(-1)
    assert uplink.memory is None


def test_without_feedback_and_without_compression_nothing_is_kept():
    made = changes(1)[0]
    for node in (Stub(name="top-k", error_feedback=False), Stub(name="qsgd"), Stub()):
        uplink = Uplink(node)
        uplink.change(made, 0)
        drive(uplink.save()) if node.compress.remembers else None
        assert uplink.memory is None and node.saved is None
    assert Uplink(Stub()).change(made, 0) is made


def test_buffers_travel_as_they_are():
    layout = Layout.of_shapes([("a", (100,))], [BufferSpec("m", (3,), torch.float32)])
    node = Stub(name="qsgd")
    vector = Vector(layout, torch.ones(100), (torch.tensor([1.0, 2.0, 3.0]),))
    sent = Uplink(node).change(vector, 0)
    assert torch.equal(opened(node, sent, layout).buffers[0], vector.buffers[0])
    for wrong in (
        sent[:2],
        (*sent[:2], torch.ones(4)),
        sent[:1],
        (*sent[:2], torch.ones(3, dtype=torch.float64)),
    ):
        with pytest.raises(ValueError, match=r"buffers|needed"):
            opened(node, wrong, layout)
    with pytest.raises(ValueError, match="compresses nothing"):
        opened(Stub(), sent, layout)
