"""Moves on several threads are those of one, bit for bit, and hold little while they wait."""

import time
import weakref
from contextvars import Context

import pytest
import torch

from edgefl.learning.workers import Workers
from edgefl.parameters import BufferSpec, Layout, Vector, WeightedMean, moves
from edgefl.parameters.moves import Moves, lent


class Counting(Workers):
    """Notes how many calls it was given."""

    given = 0

    def submit(self, call):
        self.given += 1
        return super().submit(call)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(moves, "_LEAST", 100)
    monkeypatch.setattr(moves, "_HELD", 4000)


def drawn(size, count=12):
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=generator) for _ in range(count)]


def moved(threads, start, targets):
    with lent(threads):
        found = Moves(start.clone())
        for i, target in enumerate(targets):
            found.add(target, 1 / (i + 1.5))
        return found.finish()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("size", [200, 1003, 5000])
def test_the_same_bits_on_any_threads(size, count):
    start, *targets = drawn(size)
    expected = start.clone()
    for i, target in enumerate(targets):
        expected.lerp_(target, 1 / (i + 1.5))
    threads = Counting(count)
    assert torch.equal(moved(None, start, targets), expected)
    assert torch.equal(moved(threads, start, targets), expected)
    assert threads.given > 0


def test_short_vectors_and_single_threads_move_at_once():
    threads, alone = Counting(2), Counting(1)
    for lending, size in ((threads, 199), (alone, 5000)):
        start, target = drawn(size, 2)
        with lent(lending):
            found = Moves(start)
        found.add(target, 0.25)
        assert torch.equal(start, drawn(size, 2)[0].lerp(target, 0.25))
    assert threads.given == alone.given == 0


def test_no_more_is_held_than_said():
    """Of moves of 1,000 values three wait at most: with the fourth all are made."""
    with lent(Workers(2)):
        found = Moves(torch.zeros(1000))
    held = []
    for i in range(11):
        target = torch.full((1000,), float(i))
        held.append(weakref.ref(target))
        found.add(target, 0.5)
        del target
        assert settles(lambda: sum(ref() is not None for ref in held) <= 3)
    found.finish()
    assert settles(lambda: not any(ref() is not None for ref in held))


def settles(condition):
    """Whether it comes to hold: a thread that has done its piece lets go of it a moment later."""
    end_s = time.monotonic() + 30
    while not condition() and time.monotonic() < end_s:
        time.sleep(1e-4)
    return condition()


def test_threads_are_lent_within_the_block_and_to_its_thread():
    threads, (start, target) = Counting(2), drawn(1000, 2)

    def elsewhere():
        Moves(start.clone()).add(target, 0.5)

    with lent(threads):
        Context().run(elsewhere)
    elsewhere()
    assert threads.given == 0


def test_an_error_on_another_thread_is_raised_where_the_values_are_wanted():
    with lent(Workers(2)):
        found = Moves(torch.zeros(1000))
    found.add(torch.zeros(600), 0.5)  # long enough for the first piece
    with pytest.raises(RuntimeError):
        found.finish()


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_mean_is_the_same_with_threads(dtype):
    layout = Layout.of_shapes([("weight", (1003,))], [BufferSpec("running", (2,), torch.float32)])
    vectors = [Vector(layout, x, (x[:2],)) for x in drawn(1003)]
    found = []
    for threads in (None, Counting(2)):
        with lent(threads):
            mean = WeightedMean(layout, dtype)
            for i, vector in enumerate(vectors):
                mean.add(vector, 1.0 + i)
                if i == 4:
                    halfway = mean.value(otherwise=vector)
            found.append((halfway, mean.value(otherwise=vector)))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    assert threads.given > 0
