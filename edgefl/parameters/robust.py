"""Averages that a few hostile vectors cannot move far.

Sources: coordinate median and trimmed mean, Yin et al. 2018 (https://arxiv.org/abs/1803.01498); Krum and
Multi-Krum, Blanchard et al. 2017 (https://proceedings.neurips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html).
n vectors as rows, (n, d); all work in float64 on segments, so that memory is a few segments beside them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SEGMENT = 1 << 16


def coordinate_median(rows: Tensor) -> Tensor:
    """(d,) the median of each coordinate; for even n the mean of the two middle values."""
    n = len(rows)
    return trimmed_mean(rows, (n - 1) // 2)


def trimmed_mean(rows: Tensor, trim: int) -> Tensor:
    """(d,) each coordinate's mean without its `trim` largest and smallest values.

    Raises ValueError unless n > 2 trim.
    """
    n = len(rows)
    if n <= 2 * trim or trim < 0:
        raise ValueError(f"more than {2 * trim} vectors are needed to drop {trim} at either end, found {n}")
    parts = [
        part.double().sort(dim=0).values[trim : n - trim].mean(0).to(rows.dtype)
        for part in torch.split(rows, _SEGMENT, dim=1)
    ]
    return torch.cat(parts)


def krum_scores(rows: Tensor, num_hostile: int) -> Tensor:
    """(n,) float64: sums of squared distances from each row to its n - num_hostile - 2 nearest others.

    Raises ValueError unless n >= 2 num_hostile + 3.
    """
    n = len(rows)
    if num_hostile < 0 or n < 2 * num_hostile + 3:
        needed = 2 * num_hostile + 3
        raise ValueError(f"{needed} vectors are needed to stand {num_hostile} hostile ones, found {n}")
    squared = rows.new_zeros(n, n, dtype=torch.float64)
    for part in torch.split(rows, _SEGMENT, dim=1):
        wide = part.double()
        for i in range(n):
            squared[i] += (wide - wide[i]).square().sum(1)
    squared.fill_diagonal_(torch.inf)
    nearest = squared.sort(dim=1).values[:, : n - num_hostile - 2]
    return nearest.sum(1)


def best_by_krum(rows: Tensor, num_hostile: int, num_best: int) -> list[int]:
    """The `num_best` rows with the least scores, scored once; ties go to the lowest row."""
    scores = krum_scores(rows, num_hostile)
    return torch.sort(scores, stable=True).indices[:num_best].tolist()
