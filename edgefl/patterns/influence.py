"""Averaging weights of clients who are active unequally often, so that the expected average is the mean.

Client i averages with row a_i of weights when it is active, which it is with probability p_i (its
influence score). The expected mixing matrix, p_i a_ij off its diagonal, is symmetric and doubly stochastic
exactly when p_i a_ij = p_j a_ji for all pairs. Source: SWIFT (Bornstein et al. 2023, arXiv:2210.14026).
"""

from __future__ import annotations

from collections.abc import Callable

from edgefl.network import Topology

Rows = list[dict[int, float]]
"""Row i: a_ij by j, for i itself and its neighbors, ascending; each row sums to 1."""


def balanced_row(topology: Topology, i: int, score: Callable[[int], float]) -> dict[int, float]:
    """a_ij = min(1 / (degree_i + 1), (p_j / p_i) / (degree_j + 1)), the rest to i itself.

    score: p_j > 0 by id, to any common factor. a_ii is at least 1 / (degree_i + 1) on every graph and for
    all scores. Equal scores give Metropolis weights. Needs to know neighbors only.
    """
    own = 1 / (topology.degree(i) + 1)
    row = {j: min(own, score(j) / score(i) / (topology.degree(j) + 1)) for j in topology.neighbors(i)}
    return dict(sorted({**row, i: 1.0 - sum(row.values())}.items()))


def largest_first_rows(topology: Topology) -> Rows:
    """The rule of SWIFT's authors' code, for equal scores: whoever has more neighbors chooses first.

    A client with no larger neighbor gives 1 / (degree + 1) to all of its edges. Every other takes what its
    larger neighbors chose, and gives (1 - their sum) / (remaining neighbors + 1) to each remaining one;
    between equals the smaller of the two counts, but for a client without larger neighbors, which reads
    nobody. Not safe on every graph: a row may keep less than nothing for itself, and an edge may get two
    different weights.
    """
    offers: dict[int, float] = {}
    larger: list[list[int]] = []
    for i in range(topology.n):
        larger.append([j for j in topology.neighbors(i) if topology.degree(j) > topology.degree(i)])
    for i in sorted(range(topology.n), key=lambda i: -topology.degree(i)):
        taken = sum(offers[j] for j in larger[i])
        offers[i] = (1 - taken) / (topology.degree(i) - len(larger[i]) + 1)

    def weight(i: int, j: int) -> float:
        if topology.degree(j) > topology.degree(i):
            return offers[j]
        equals = topology.degree(j) == topology.degree(i)
        return min(offers[i], offers[j]) if equals and larger[i] else offers[i]

    rows = []
    for i in range(topology.n):
        row = {j: weight(i, j) for j in topology.neighbors(i)}
        rows.append(dict(sorted({**row, i: 1.0 - sum(row.values())}.items())))
    return rows
