"""Sparse vectors: the largest entries, and their place as indices or as a bitmap, whichever is shorter.

Source: top-k sparsification, Aji and Heafield 2017 (https://arxiv.org/abs/1704.05021), Stich et al. 2018
(https://arxiv.org/abs/1809.07599).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def top_k(values: Tensor, k: int) -> Tensor:
    """Indices (k,) int64, ascending, of the k entries of largest magnitude; ties go to the lowest index.

    values: (d,), 1 <= k <= d. NaN counts as the largest magnitude.

    >>> top_k(torch.tensor([1.0, -3.0, 3.0, 3.0]), 2).tolist()
    [1, 2]
    """
    magnitude = values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    threshold = torch.topk(magnitude, k, sorted=True).values[-1]
    above = magnitude > threshold
    ties = (magnitude == threshold).nonzero().squeeze(1)[: k - int(above.sum())]
    above[ties] = True
    return above.nonzero().squeeze(1)


def pack_sparse(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(place, entries) of a vector (d,) that is zero but at `indices` (k,), ascending.

    entries: (k,). place: (k,) int32 indices, or with k > d / 32 a bitmap, (ceil(d / 8),) uint8, which is
    shorter then: 8 k or d / 8 + 4 k bytes in all for float32. Their dtype tells them apart.
    """
    d = len(values)
    if len(indices) * 32 <= d:
        return indices.to(torch.int32), values[indices]
    held = np.zeros(d, np.bool_)
    held[indices.numpy()] = True
    return torch.from_numpy(np.packbits(held)), values[indices]


def unpack_sparse(place: Tensor, entries: Tensor, size: int) -> Tensor:
    """The vector (size,) that pack_sparse was given.

    Raises ValueError for places outside the vector, or as many as there are no entries for.
    """
    if place.dtype is torch.uint8:
        if place.shape != (-(-size // 8),):
            raise ValueError(f"a bitmap of {size} bits is needed, found {tuple(place.shape)} bytes")
        indices = torch.from_numpy(np.flatnonzero(np.unpackbits(place.numpy(), count=size)))
    else:
        indices = place.long()
    if entries.dim() != 1 or indices.shape != entries.shape or not entries.is_floating_point():
        raise ValueError(f"{len(indices)} entries are needed, found {tuple(entries.shape)}")
    if bool(((indices < 0) | (indices >= size)).any()):
        raise ValueError(f"places below {size} are needed, found {indices.tolist()[:4]}")
    dense = entries.new_zeros(size)
    dense[indices] = entries
    return dense
