"""A vector with its buffers as one tensor and back, and its segments."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from edgefl.parameters import BufferSpec, Layout, Vector
from edgefl.parameters.packing import pack, segment_bounds, unpack

LAYOUT = Layout.of_shapes(
    [("w", (2, 2))], [BufferSpec("mean", (2,), torch.float32), BufferSpec("count", (), torch.int64)]
)


def vector():
    return Vector(LAYOUT, torch.arange(4.0), (torch.tensor([5.0, 6.0]), torch.tensor(7)))


def test_floating_buffers_travel_behind_the_parameters_and_counters_stay():
    packed = pack(vector())
    assert packed.tolist() == [0, 1, 2, 3, 5, 6]
    back = unpack(packed * 10, vector())
    assert back.values.tolist() == [0, 10, 20, 30]
    assert back.buffers[0].tolist() == [50, 60] and back.buffers[1].item() == 7
    assert unpack(packed, vector()).equal(vector())


def test_another_number_of_values_is_refused():
    for size in (5, 7):
        with pytest.raises(ValueError, match=f"6 values are needed, found {size}"):
            unpack(torch.zeros(size), vector())


@pytest.mark.parametrize(("size", "num"), [(10, 1), (10, 3), (10, 10), (4810, 9)])
def test_segments_are_equal_but_for_the_last_which_takes_the_rest(size, num):
    bounds = segment_bounds(size, num)
    sizes = [end - begin for begin, end in bounds]
    assert bounds[0][0] == 0 and bounds[-1][1] == size
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    assert sizes[:-1] == [size // num] * (num - 1) and sizes[-1] == size // num + size % num


@pytest.mark.parametrize("num", [0, 11])
def test_impossible_numbers_of_segments_are_refused(num):
    with pytest.raises(ValueError, match="1 to 10 segments"):
        segment_bounds(10, num)
