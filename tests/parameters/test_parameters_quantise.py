"""Quantisation: unbiased, bounded, of the stated size, and the same from the same key."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgefl.keyed import generator
from edgefl.parameters.quantise import bits_per_entry, dequantise, quantise


def vector(d, seed=0):
    return torch.randn(d, generator=torch.Generator().manual_seed(seed))


def once(v, levels, bucket, seed=0, norm="2"):
    norms, codes = quantise(v, levels, bucket, generator(seed, "test"), norm)
    return dequantise(norms, codes, len(v), levels, bucket)


def test_bits():
    assert [bits_per_entry(s) for s in (1, 3, 7, 8, 127)] == [2, 3, 4, 5, 8]


@pytest.mark.parametrize(
    ("d", "levels", "bucket"), [(1000, 7, 512), (1000, 1, 64), (513, 127, 512), (7, 3, 8)]
)
def test_bytes_are_a_norm_and_fixed_codes_for_each_bucket(d, levels, bucket):
    norms, codes = quantise(vector(d), levels, bucket, generator(0, "test"))
    sizes = [min(bucket, d - at) for at in range(0, d, bucket)]
    bits = bits_per_entry(levels)
    assert norms.nbytes + codes.nbytes == sum(4 + -(-b * bits // 8) for b in sizes)


@pytest.mark.parametrize("norm", ["2", "max"])
def test_an_entry_errs_by_a_level_at_most(norm):
    v = vector(64)
    size = float(v.norm() if norm == "2" else v.abs().max())
    for levels in (1, 7, 1000):
        assert float((once(v, levels, 64, norm=norm) - v).abs().max()) <= size / levels * (1 + 1e-5)


def test_entries_on_a_level_come_through():
    v = torch.tensor([3.0, -4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # norm 5: levels of 1
    assert torch.allclose(once(v, 5, 8), v, rtol=1e-6, atol=0)
    assert torch.equal(once(torch.zeros(20), 7, 8), torch.zeros(20))


def test_the_mean_of_many_draws_is_the_vector_and_their_variance_is_bounded():
    v, draws, b = vector(64), 20_000, 64
    for levels, worst in ((1, 8.0), (7, 8 / 7)):  # min(b / s^2, sqrt(b) / s)
        norms = torch.full((draws,), float(v.norm()))
        wide = v.repeat(draws)
        n, codes = quantise(wide, levels, b, np.random.default_rng(levels))
        assert torch.allclose(n, norms, rtol=1e-6)
        q = dequantise(n, codes, len(wide), levels, b).view(draws, b).double()
        error = q.mean(0) - v.double()
        standard = q.std(0) / draws**0.5
        assert bool((error.abs() <= 5 * standard + 1e-6).all())
        variance = float((q - v.double()).square().sum(1).mean() / v.double().square().sum())
        assert variance <= worst and variance == pytest.approx({1: 5.3, 7: 0.20}[levels], rel=0.2)


def test_the_same_key_gives_the_same_bytes_and_another_key_others():
    v = vector(1000)
    one, two, other = (quantise(v, 7, 64, generator(s, "test"))[1] for s in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_what_is_no_number_stays_so():
    v = vector(64)
    v[3] = torch.nan
    assert bool(once(v, 7, 64).isnan().all())
    v[3] = torch.inf
    assert not bool(once(v, 7, 64).isfinite().any())


def test_other_shapes_and_levels_are_refused():
    norms, codes = quantise(vector(100), 5, 64, generator(0, "test"))
    for n, c in ((norms[:1], codes), (norms, codes[:-1]), (norms.double(), codes)):
        with pytest.raises(ValueError, match="needed"):
            dequantise(n, c, 100, 5, 64)
    with pytest.raises(ValueError, match="levels up to 5"):
        dequantise(norms, torch.full_like(codes, 255), 100, 5, 64)
