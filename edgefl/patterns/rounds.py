"""Choosing a round's cohort."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def cohort(rng: np.random.Generator, ids: Sequence[int], size: int) -> list[int]:
    """`size` of `ids` uniformly without replacement, ascending; all of them when size reaches their number."""
    if size >= len(ids):
        return list(ids)
    return sorted(int(i) for i in rng.choice(np.asarray(ids), size, replace=False))
