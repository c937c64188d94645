"""What crosses a cut: sizes as promised, and errors that are what they should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgefl.parameters.crossing import WHOLE, Packing, unpacked

VALUES = torch.from_numpy(np.random.default_rng(0).standard_normal((37, 41)).astype(np.float32))


def crossed(packing: Packing, seed: int = 0) -> torch.Tensor:
    packed = packing.pack(VALUES, np.random.default_rng(seed))
    assert sum(t.numel() * t.element_size() for t in packed) == packing.size_bytes(VALUES.numel())
    return unpacked(packed, VALUES.numel()).view(VALUES.shape)


def test_whole_is_exact():
    assert WHOLE.exact and torch.equal(crossed(WHOLE), VALUES)


def test_eight_bits_are_near_and_right_on_average():
    eight = Packing(bits=8)
    assert 0 < float((crossed(eight) - VALUES).norm() / VALUES.norm()) < 0.02
    mean = torch.stack([crossed(eight, seed) for seed in range(200)]).mean(0)
    assert float((mean - VALUES).norm() / VALUES.norm()) < 0.02 / 10


@pytest.mark.parametrize("keep", [0.01, 0.3])
def test_the_largest_values_travel_as_they_are_and_the_others_not_at_all(keep):
    found = crossed(Packing(keep=keep))
    kept = found != 0
    assert int(kept.sum()) == int(np.ceil(keep * VALUES.numel()))
    assert torch.equal(found[kept], VALUES[kept])
    assert float(VALUES[~kept].abs().max()) <= float(VALUES[kept].abs().min())


def test_noise_has_the_deviation_that_was_asked_for():
    added = crossed(Packing(noise=0.5)) - VALUES
    assert float(added.std()) == pytest.approx(0.5, rel=0.05) and abs(float(added.mean())) < 0.05
    assert torch.equal(crossed(Packing(noise=0.5), 1), crossed(Packing(noise=0.5), 1))
