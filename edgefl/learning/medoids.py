"""k-medoids: the k of n points that lie nearest to all.

Greedy BUILD, then SWAP: the best exchange of a medoid for another point, as long as one makes the sum of
distances to the nearest medoid smaller. A pass looks at all exchanges at once, in O(n^2). Deterministic; ties
go to the lowest index. Sums that differ by less than a billionth of the whole count as equal: of two points
that have only each other either is as good a medoid, at any distance, and rounding must not choose.
Source: PAM (Kaufman and Rousseeuw 1990); how a pass shares its sums: FasterPAM (Schubert and Rousseeuw 2021,
https://arxiv.org/abs/2008.05171), of which this takes the best exchange of a pass, not the first good one.
"""

from __future__ import annotations

import numpy as np

MOST_SWAPS = 50
"""Exchanges at most: what is left to gain after so many is small."""
TIE = 1e-9
"""Sums that differ by less than this share of the whole count as equal."""


def k_medoids(distances: np.ndarray, k: int) -> np.ndarray:
    """(k,) int64 ascending: the points chosen. distances: (n, n) float64, symmetric, 0 on the diagonal.

    Raises ValueError unless 1 <= k <= n.
    """
    n = len(distances)
    if not 1 <= k <= n:
        raise ValueError(f"1 to {n} medoids of {n} points, found {k}")
    if k == n:
        return np.arange(n)
    medoids = build(distances, k)
    for _ in range(MOST_SWAPS):
        exchange = _best_exchange(distances, medoids)
        if exchange is None:
            break
        place, point = exchange
        medoids[place] = point
    return np.sort(medoids)


def build(distances: np.ndarray, k: int) -> np.ndarray:
    """(k,) medoids by greed: the point of least total distance, then whichever lowers the sum most."""
    nearest = np.full(len(distances), np.inf)
    medoids, room = np.empty(k, np.int64), np.empty_like(distances)
    taken = np.zeros(len(distances), bool)
    for i in range(k):
        totals = np.minimum(distances, nearest, out=room).sum(1)
        totals[taken] = np.inf
        least = totals.min()
        medoids[i] = (totals <= least + TIE * least).argmax()
        taken[medoids[i]] = True
        np.minimum(nearest, distances[medoids[i]], out=nearest)
    return medoids


def objective(distances: np.ndarray, medoids: np.ndarray) -> float:
    """The sum over all points of the distance to the nearest medoid."""
    return float(distances[medoids].min(0).sum())


def counts(distances: np.ndarray, medoids: np.ndarray) -> np.ndarray:
    """(k,) int64: how many points each medoid is the nearest of, itself at least.

    medoids: ascending; of several at one distance the first counts the point.
    """
    nearest = distances[medoids].argmin(0)
    nearest[medoids] = np.arange(len(medoids))
    return np.bincount(nearest, minlength=len(medoids))


def _best_exchange(distances: np.ndarray, medoids: np.ndarray) -> tuple[int, int] | None:
    """The place among the medoids and the point that takes it, of the largest gain; None without gain."""
    to_medoids, k = distances[medoids], len(medoids)
    owner = to_medoids.argmin(0)
    order = owner.argsort(kind="stable")
    ranked = np.partition(to_medoids, 1, axis=0)[:2] if k > 1 else to_medoids
    first, second = ranked[0][order, None], ranked[1][order, None] if k > 1 else np.inf
    mine = distances[order]  # points i by owner, one beside the other; [i, j]
    with_first = np.minimum(mine, first)  # what i pays once j is a medoid beside the others
    # Where i's own medoid goes, i pays for j or for its second nearest one.
    without = np.minimum(mine, second, out=mine)
    without -= with_first
    owners, starts = np.unique(owner[order], return_index=True)
    change = np.tile(with_first.sum(0) - first.sum(), (k, 1))
    change[owners] += np.add.reduceat(without, starts, axis=0)
    change[:, medoids] = np.inf
    tie = TIE * float(first.sum())
    best = float(change.min())
    point = int((change.min(0) <= best + tie).argmax())
    place = int((change[:, point] <= best + tie).argmax())
    return (place, point) if best < -tie else None
