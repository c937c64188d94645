"""How a tensor crosses a cut: whole, rounded to 8 bits, or its largest values alone; with noise or not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edgefl.parameters.quantise import dequantise, quantise
from edgefl.parameters.sparse import pack_sparse, top_k, unpack_sparse

_LEVELS, _BUCKET = 127, 512  # a sign and 7 bits; a scale of 4 bytes for each 512 values


@dataclass(frozen=True)
class Packing:
    """bits: per value, 32 or 8. keep: share of the values that travel, those of largest magnitude.

    noise: standard deviation of the normal noise that a sender adds first.
    """

    bits: int = 32
    keep: float = 1.0
    noise: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether what arrives is what was sent."""
        return self.bits == 32 and self.keep == 1 and self.noise == 0

    def size_bytes(self, count: int) -> int:
        """Payload bytes of so many float32 values.

        >>> Packing().size_bytes(1000), Packing(bits=8).size_bytes(1000), Packing(keep=0.1).size_bytes(1000)
        (4000, 1008, 525)
        """
        if self.keep < 1:
            kept = self._kept(count)
            return 8 * kept if kept * 32 <= count else -(-count // 8) + 4 * kept
        return 4 * count if self.bits == 32 else count + 4 * -(-count // _BUCKET)

    def _kept(self, count: int) -> int:
        return max(1, math.ceil(self.keep * count))

    def pack(self, values: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """A tensor as it travels. Rounding up or down, and noise, are by chance; rounding is unbiased."""
        flat = values.reshape(-1)
        if self.noise:
            drawn = rng.standard_normal(len(flat), dtype=np.float32)
            flat = flat + self.noise * torch.from_numpy(drawn)
        if self.keep < 1:
            return pack_sparse(flat, top_k(flat, self._kept(len(flat))))
        return (flat,) if self.bits == 32 else quantise(flat, _LEVELS, _BUCKET, rng, "max")


WHOLE = Packing()
"""As it is."""


def unpacked(values: tuple[Tensor, ...], size: int) -> Tensor:
    """What `pack` made a vector (size,) into. Raises ValueError for what does not fit the size."""
    if len(values) == 1:
        return values[0].reshape(size)
    first, second = values
    if first.is_floating_point():  # scales and codes
        return dequantise(first, second, size, _LEVELS, _BUCKET)
    return unpack_sparse(first, second, size)
