"""Vectors, running means, mixing and layouts, against values worked by hand and float64 references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edgefl.parameters import BufferSpec, Layout, Vector, WeightedMean, mix

DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
LAYOUT = Layout.of_shapes([("a", (2, 3)), ("scale", ()), ("b", (4,))])
BUFFERED = Layout.of_shapes(
    [("a", (3,))], [BufferSpec("mean", (2,), torch.float32), BufferSpec("count", (), torch.int64)]
)


def vector(*values: float) -> Vector:
    layout = Layout.of_shapes([("a", (len(values),))])
    return Vector(layout, torch.tensor(values))


def drawn(seed: int, layout: Layout = LAYOUT) -> Vector:
    return Vector(layout, torch.randn(layout.size, generator=torch.Generator().manual_seed(seed)))


def buffered(values: list[float], mean: list[float], count: int) -> Vector:
    return Vector(BUFFERED, torch.tensor(values), (torch.tensor(mean), torch.tensor(count)))


def test_a_layout_lays_tensors_out_one_after_the_other():
    assert [(e.name, e.shape, e.offset, e.numel) for e in LAYOUT.entries] == [
        ("a", (2, 3), 0, 6), ("scale", (), 6, 1), ("b", (4,), 7, 4)
    ]  # fmt: skip
    assert LAYOUT.size == 11 and LAYOUT.slice("b") == slice(7, 11)
    with pytest.raises(KeyError):
        LAYOUT.slice("c")


def test_views_share_memory_and_keep_leading_dimensions():
    flat = torch.arange(22.0).view(2, 11)
    views = LAYOUT.views(flat)
    assert views["a"].shape == (2, 2, 3) and views["scale"].shape == (2,)
    assert views["b"][1].tolist() == [18.0, 19.0, 20.0, 21.0]
    views["scale"][0] = -1.0
    assert flat[0, 6] == -1.0
    with pytest.raises(ValueError, match="a vector of 11 values is needed, found 10"):
        LAYOUT.views(torch.zeros(10))


def test_a_modules_layout_names_parameters_and_buffers_in_order():
    layout = Layout.of_module(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    assert [e.name for e in layout.entries] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [(b.name, b.shape, b.dtype) for b in layout.buffers] == [
        ("1.running_mean", (2,), torch.float32),
        ("1.running_var", (2,), torch.float32),
        ("1.num_batches_tracked", (), torch.int64),
    ]
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match="one dtype"):
        Layout.of_module(mixed)


def test_the_digest_tells_layouts_apart():
    same = Layout.of_shapes([("a", (2, 3)), ("scale", ()), ("b", (4,))])
    others = [
        Layout.of_shapes([("a", (3, 2)), ("scale", ()), ("b", (4,))]),
        Layout.of_shapes([("x", (2, 3)), ("scale", ()), ("b", (4,))]),
        Layout.of_shapes([("a", (2, 3)), ("scale", ()), ("b", (4,))], dtype=torch.float64),
        Layout(LAYOUT.entries, (BufferSpec("n", (), torch.int64),)),
    ]
    assert same.digest == LAYOUT.digest
    assert len({LAYOUT.digest, *(other.digest for other in others)}) == 5


def test_a_vector_refuses_another_size_dtype_or_number_of_buffers():
    with pytest.raises(ValueError, match=r"\(11,\) torch.float32 values are needed, found \(10,\)"):
        Vector(LAYOUT, torch.zeros(10))
    with pytest.raises(ValueError, match=r"found \(11,\) torch.float64"):
        Vector(LAYOUT, torch.zeros(11, dtype=torch.float64))
    with pytest.raises(ValueError, match="2 buffers are needed, found 0"):
        Vector(BUFFERED, torch.zeros(3))


def test_arithmetic_by_hand_changes_no_operand():
    x, y = vector(1.0, 2.0), vector(3.0, -4.0)
    assert (x + y).values.tolist() == [4.0, -2.0]
    assert (x - y).values.tolist() == [-2.0, 6.0]
    assert (x * 2).values.tolist() == (2 * x).values.tolist() == [2.0, 4.0]
    assert (y / 2).values.tolist() == [1.5, -2.0]
    assert (-y).values.tolist() == [-3.0, 4.0]
    assert x.lerp(y, 0.25).values.tolist() == [1.5, 0.5]
    assert y.norm() == 5.0
    assert x.values.tolist() == [1.0, 2.0] and y.values.tolist() == [3.0, -4.0]


def test_vectors_of_different_layouts_do_not_mix():
    with pytest.raises(ValueError, match="one layout"):
        vector(1.0) + vector(1.0, 2.0)
    with pytest.raises(ValueError, match="one layout"):
        WeightedMean(LAYOUT).add(vector(1.0))


def test_lerp_at_its_ends_is_bitwise():
    x, y = drawn(1), drawn(2)
    assert x.lerp(y, 1.0).equal(y) and x.lerp(y, 0.0).equal(x)


def test_fragments_are_read_and_replaced_in_copies():
    x = vector(1.0, 2.0, 3.0)
    where = torch.tensor([2, 0])
    assert x[where].tolist() == [3.0, 1.0]
    assert x.replace(where, torch.tensor([9.0, 8.0])).values.tolist() == [8.0, 2.0, 9.0]
    assert x.replace(slice(0, 2), torch.zeros(2)).values.tolist() == [0.0, 0.0, 3.0]
    assert x.values.tolist() == [1.0, 2.0, 3.0]


def test_named_gives_views_by_shape_and_buffers():
    x = buffered([1.0, 2.0, 3.0], [0.5, 0.5], 7)
    named = x.named()
    assert named["a"].tolist() == [1.0, 2.0, 3.0] and named["count"] == 7
    assert named["a"].data_ptr() == x.values.data_ptr()
    assert x.nbytes == 3 * 4 + 2 * 4 + 8


def test_a_nan_equals_nothing():
    assert vector(1.0).equal(vector(1.0)) and not vector(float("nan")).equal(vector(float("nan")))


def test_float_buffers_follow_and_counters_take_the_larger():
    x, y = buffered([1.0, 1.0, 1.0], [2.0, 4.0], 7), buffered([0.0, 0.0, 0.0], [1.0, 1.0], 9)
    for combined, mean in ((x + y, [3.0, 5.0]), (x - y, [1.0, 3.0]), (x.lerp(y, 0.5), [1.5, 2.5])):
        assert combined.buffers[0].tolist() == mean and combined.buffers[1] == 9
    assert (x * 0.5).buffers[0].tolist() == [1.0, 2.0] and (x * 0.5).buffers[1] == 7


@pytest.mark.parametrize("shape", [(), (3,)], ids=["0-d", "1-d"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buffers_of_every_dtype_in_sums_means_and_mixes(dtype, shape):
    layout = Layout.of_shapes([("a", (1,))], [BufferSpec("b", shape, dtype)])
    low, high = (torch.full(shape, value).to(dtype) for value in (0, 1))
    x, y = (Vector(layout, torch.zeros(1), (b,)) for b in (low, high))
    mean = WeightedMean(layout)
    mean.add(x, 1.0)
    mean.add(y, 3.0)
    results = [x + y, mean.value(otherwise=x), mix({0: x, 1: y}, {0: 0.25, 1: 0.75})]
    expected = (1.0, 0.75, 0.75) if dtype.is_floating_point else (1, 1, 1)
    for result, value in zip(results, expected, strict=True):
        (got,) = result.buffers
        assert got.dtype == dtype and got.shape == shape
        assert torch.equal(got, torch.full(shape, value).to(dtype))
    assert torch.equal(x.buffers[0], low) and torch.equal(y.buffers[0], high)


def test_a_mean_of_one_value_is_that_value_bit_for_bit():
    mean, x = WeightedMean(LAYOUT), drawn(3)
    mean.add(x, 0.3)
    assert mean.value(otherwise=drawn(4)).equal(x)


def test_equal_values_stay_what_they_are():
    mean, x = WeightedMean(LAYOUT), drawn(5)
    for weight in (1.0, 2.5, 1e-3, 7.0):
        mean.add(x, weight)
    assert mean.value(otherwise=drawn(6)).equal(x) and mean.count == 4


def test_a_mean_of_nothing_is_the_alternative():
    mean, x = WeightedMean(LAYOUT), drawn(7)
    mean.add(drawn(8), 0.0)
    assert mean.value(otherwise=x) is x and mean.weight == 0


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_mean_refuses_impossible_weights(weight):
    with pytest.raises(ValueError, match="nonnegative weight"):
        WeightedMean(LAYOUT).add(drawn(0), weight)


def test_a_mean_keeps_its_own_memory():
    mean, x = WeightedMean(BUFFERED), buffered([1.0, 2.0, 3.0], [1.0, 1.0], 1)
    mean.add(x)
    early = mean.value(otherwise=x)
    mean.add(buffered([9.0, 9.0, 9.0], [9.0, 9.0], 9))
    assert early.equal(buffered([1.0, 2.0, 3.0], [1.0, 1.0], 1))
    assert x.equal(buffered([1.0, 2.0, 3.0], [1.0, 1.0], 1))


@settings(max_examples=50, deadline=None)
@given(
    weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20),
    seed=st.integers(0, 1 << 16),
    wide=st.booleans(),
)
def test_a_mean_agrees_with_float64(weights, seed, wide):
    xs = [drawn(seed + k) for k in range(len(weights))]
    mean = WeightedMean(LAYOUT, torch.float64 if wide else None)
    for x, weight in zip(xs, weights, strict=True):
        mean.add(x, weight)
    exact = sum(x.values.double() * w for x, w in zip(xs, weights, strict=True)) / sum(weights)
    tolerance = 1e-7 if wide else 1e-6
    assert torch.allclose(
        mean.value(otherwise=xs[0]).values.double(), exact, rtol=tolerance, atol=3 * tolerance
    )


def test_mix_by_hand_and_in_any_order():
    x, y, z = vector(1.0), vector(2.0), vector(4.0)
    row = {0: 0.5, 1: 0.25, 2: 0.25}
    assert mix({0: x, 1: y, 2: z}, row).values.tolist() == [2.0]
    xs = {k: drawn(k) for k in range(5)}
    W = dict(enumerate([0.1, 0.2, 0.3, 0.15, 0.25]))
    backwards = dict(reversed(xs.items())), dict(reversed(W.items()))
    assert mix(xs, W).equal(mix(*backwards))
    exact = sum(xs[k].values.double() * W[k] for k in range(5))
    assert torch.equal(mix(xs, W).values, exact.float())


def test_mix_refuses_other_ids_and_rows_that_do_not_sum_to_one():
    with pytest.raises(ValueError, match=r"weights for nodes \[0, 2\] but models of \[0, 1\]"):
        mix({0: vector(1.0), 1: vector(1.0)}, {0: 0.5, 2: 0.5})
    for row in ({0: 0.5, 1: 0.6}, {0: 1.5, 1: -0.5}):
        with pytest.raises(ValueError, match="nonnegative weights that sum to 1"):
            mix({0: vector(1.0), 1: vector(1.0)}, row)
    with pytest.raises(ValueError, match="one layout"):
        mix({0: vector(1.0), 1: vector(1.0, 2.0)}, {0: 0.5, 1: 0.5})
