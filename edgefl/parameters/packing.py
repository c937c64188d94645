"""A vector and its floating-point buffers as one tensor, and that tensor in contiguous segments."""

from __future__ import annotations

import torch
from torch import Tensor

from edgefl.parameters.vector import Vector


def pack(vector: Vector) -> Tensor:
    """(P + B,) the parameters, and behind them the B values of floating-point buffers, in their order."""
    floats = [b for b in vector.buffers if b.is_floating_point()]
    return torch.cat([vector.values, *(b.reshape(-1).to(vector.values.dtype) for b in floats)])


def unpack(packed: Tensor, like: Vector) -> Vector:
    """The vector that `packed` (P + B,) holds, in the layout of `like`, whose integer buffers it keeps.

    Raises ValueError for another number of values.
    """
    size = like.layout.size + sum(b.numel() for b in like.buffers if b.is_floating_point())
    if size != len(packed):
        raise ValueError(f"{size} values are needed, found {len(packed)}")
    buffers, at = [], like.layout.size
    for b in like.buffers:
        if b.is_floating_point():
            buffers.append(packed[at : at + b.numel()].reshape(b.shape).to(b.dtype))
            at += b.numel()
        else:
            buffers.append(b)
    return Vector(like.layout, packed[: like.layout.size].clone(), tuple(buffers))


def segment_bounds(size: int, num_segments: int) -> list[tuple[int, int]]:
    """Where each segment begins and ends: floor(size / num_segments) values, and in the last also the rest.

    Raises ValueError unless 1 <= num_segments <= size.

    >>> segment_bounds(10, 4)
    [(0, 2), (2, 4), (4, 6), (6, 10)]
    """
    if not 1 <= num_segments <= size:
        raise ValueError(f"1 to {size} segments, found {num_segments}")
    each = size // num_segments
    starts = [k * each for k in range(num_segments)]
    return list(zip(starts, [*starts[1:], size], strict=True))
