"""Stochastic quantisation to a few levels per bucket of entries.

Source: QSGD, Alistarh et al. 2017 (https://arxiv.org/abs/1610.02132). Choice: levels of a fixed number of
bits instead of the paper's Elias code.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Norm = Literal["2", "max"]
_NEAR_A_LEVEL = 1e-6
"""An entry this near to a level, in levels, is on it: its distance is rounding."""


def bits_per_entry(levels: int) -> int:
    """A sign, and as many bits as count from 0 to `levels`: 4 for 7 levels."""
    return 1 + math.ceil(math.log2(levels + 1))


def quantise(
    values: Tensor, levels: int, bucket: int, rng: np.random.Generator, norm: Norm = "2"
) -> tuple[Tensor, Tensor]:
    """(norms, codes) of a vector: each entry becomes norm sign q / levels, q a level next to it.

    values: (d,) float32. bucket: entries that share a norm, a multiple of 8. levels: s; rng decides up or
    down so that the expectation is the entry. norm: the bucket's Euclidean one or its largest magnitude.
    norms: (ceil(d / bucket),) float32. codes: uint8, bits_per_entry(levels) bits for each entry:
    4 + ceil(b (1 + ceil(log2(s + 1))) / 8) bytes for a bucket of b. Values that are not finite stay so.
    """
    d, buckets = len(values), -(-len(values) // bucket)
    padded = np.zeros(buckets * bucket, np.float64)
    padded[:d] = values.numpy()
    rows = padded.reshape(buckets, bucket)
    with np.errstate(invalid="ignore", over="ignore"):
        norms = np.abs(rows).max(1) if norm == "max" else np.sqrt((rows * rows).sum(1))
        norms32 = norms.astype(np.float32)
        scaled = np.abs(rows) * (levels / np.where(norms > 0, norms, 1.0))[:, None]
    scaled = np.clip(np.nan_to_num(scaled, nan=0.0, posinf=0.0), 0.0, levels)
    lower = np.floor(scaled + _NEAR_A_LEVEL)
    above = scaled - lower
    draws = rng.random(rows.shape)
    q = np.minimum(lower + (draws < np.where(above > _NEAR_A_LEVEL, above, 0.0)), levels)
    codes = q.astype(np.uint32) * 2 + (rows < 0)
    return torch.from_numpy(norms32), torch.from_numpy(_to_bytes(codes.reshape(-1)[:d], levels))


def dequantise(norms: Tensor, codes: Tensor, size: int, levels: int, bucket: int) -> Tensor:
    """The vector (size,) float32 that norms and codes stand for. Raises ValueError for other shapes."""
    bits, buckets = bits_per_entry(levels), -(-size // bucket)
    shapes = tuple(norms.shape), tuple(codes.shape)
    if shapes != ((buckets,), (-(-size * bits // 8),)) or norms.dtype is not torch.float32:
        raise ValueError(f"{buckets} norms and {size} codes of {bits} bits are needed, found {shapes}")
    flat = np.unpackbits(codes.numpy(), count=size * bits).reshape(size, bits)
    numbers = flat.astype(np.int64) @ (1 << np.arange(bits - 1, -1, -1, dtype=np.int64))
    if size and int(numbers.max()) >> 1 > levels:
        raise ValueError(f"levels up to {levels} are needed, found {int(numbers.max()) >> 1}")
    signed = (numbers >> 1) * np.where(numbers & 1, -1, 1)
    shares = torch.from_numpy(signed.astype(np.float32) / np.float32(levels))
    scale = norms.repeat_interleave(bucket)[:size]
    return torch.where(scale.isfinite(), shares * scale, scale)


def _to_bytes(codes: np.ndarray, levels: int) -> np.ndarray:
    bits = bits_per_entry(levels)
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint32)
    return np.packbits(((codes[:, None] >> shifts) & 1).astype(np.uint8).reshape(-1))
