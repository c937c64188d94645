"""Arithmetic that is put off: the bits of what is done at once, made once, and nothing held for long."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from edgefl.parameters import BufferSpec, Layout, Vector, mix
from edgefl.parameters.deferred import MEAN, MOST_DEPTH, MOST_VALUES, SUM, Order, Recipe, made, stacked

ROW = {0: 0.2, 1: 0.3, 2: 0.5}


def layout(size=37):
    return Layout.of_shapes([("a", (size,))])


def drawn(seed, of=None):
    of = of or layout()
    return Vector(of, torch.randn(of.size, generator=torch.Generator().manual_seed(seed)))


def is_made(vector):
    return not isinstance(vector.held, Recipe)


def mixed_at_once(vectors, row):
    total = vectors[0].values.to(torch.float64).mul_(row[0])
    for j in range(1, len(vectors)):
        total.add_(vectors[j].values, alpha=row[j])
    return total.to(torch.float32)


@pytest.mark.parametrize("size", [1, 15, 16, 37, 4810])
def test_what_is_put_off_has_the_bits_of_what_is_done_at_once(size):
    x, y, z = (drawn(seed, layout(size)) for seed in range(3))
    step = mix({0: x, 1: y, 2: z}, ROW) + (z - x)
    assert not is_made(step)
    expected = mixed_at_once([x, y, z], ROW) + (z.values - x.values)
    assert torch.equal(step.values, expected) and is_made(step)
    assert step.values is step.values


def test_the_compiled_source_has_the_same_bits():
    sources = [drawn(seed, layout(4810)).values for seed in range(3)]
    recipes = [[MEAN, 0, 1, 2], [SUM, 2, 0], [SUM, -1, -2]]
    factors = [[0.2, 0.3, 0.5], [-1.0], [1.0]]
    unit = torch.jit.CompilationUnit(inspect.getsource(made) + inspect.getsource(stacked))
    plain = made(sources, recipes, factors)
    for _ in range(3):  # the third is optimised
        found, rows = unit.stacked((sources, recipes, factors, [-3, 1]))
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        assert torch.equal(rows[0], plain[2]) and torch.equal(rows[1], sources[1])


def test_one_model_for_all_is_not_copied():
    x = drawn(0)
    _, rows = stacked(Order([x, x, x]).ingredients)
    assert rows.shape == (3, 37) and rows.data_ptr() == x.values.data_ptr()


def test_what_several_need_is_made_once():
    x, y = drawn(0), drawn(1)
    shared = x + y
    order = Order([shared - x, shared - y])
    assert len(order.recipes) == 3 and len(order.sources) == 2
    order.make()
    assert is_made(shared) and torch.equal(shared.values, x.values + y.values)


def test_who_is_made_lets_go_of_what_it_was_made_of():
    x = drawn(0)
    total = x + drawn(1)
    recipe = total.held
    assert isinstance(recipe, Recipe) and recipe.parents[0] is x
    assert isinstance(total.values, torch.Tensor) and total.held is total.values


def test_recipes_do_not_pile_up():
    total, expected = drawn(0), drawn(0).values
    for seed in range(1, 50):
        total, expected = total + drawn(seed), expected + drawn(seed).values
        assert total.depth <= MOST_DEPTH
    assert torch.equal(total.values, expected) and total.depth == 0


def test_large_models_and_buffers_are_made_at_once():
    large = drawn(0, layout(MOST_VALUES + 1))
    assert is_made(large + large) and is_made(mix({0: large, 1: large}, {0: 0.5, 1: 0.5}))
    of = Layout.of_shapes([("a", (2,))], [BufferSpec("mean", (1,), torch.float32)])
    x = Vector(of, torch.ones(2), (torch.ones(1),))
    assert is_made(x - x) and is_made(mix({0: x, 1: x}, {0: 0.5, 1: 0.5}))


def test_a_mistake_shows_at_once():
    with pytest.raises(ValueError, match="one layout"):
        drawn(0) + drawn(1, layout(5))
    with pytest.raises(ValueError, match="one layout"):
        mix({0: drawn(0), 1: drawn(1, layout(5))}, {0: 0.5, 1: 0.5})


def test_weight_and_size_are_known_beforehand():
    total = drawn(0) + drawn(1)
    assert total.nbytes == 37 * 4 and not is_made(total)


def test_threads_that_read_one_value_find_equal_bits():
    x, y = drawn(0, layout(4810)), drawn(1, layout(4810))
    expected = (x.values + y.values) - x.values
    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            deferred = (x + y) - x
            for values in pool.map(lambda _, d=deferred: d.values, range(8)):
                assert torch.equal(values, expected)


def test_the_middle_is_half_the_sum():
    x, y = drawn(0), drawn(1)
    assert torch.equal(x.middle(y).values, (x.values + y.values) / 2)
