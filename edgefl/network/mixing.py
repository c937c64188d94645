"""Mixing matrices: what share of its neighbors' parameters a node takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgefl.errors import ConfigError, nearest
from edgefl.network.topology import Topology

KEY = "network.mixing"
TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class MixingMatrix:
    """W (n, n), W[i, j]: share of j in i. Rows are made when asked for, so dense graphs cost no memory.

    rows: i -> {j: W[i, j]} for the node itself and its neighbors, ascending by id.
    """

    name: str
    n: int
    rows: Callable[[int], dict[int, float]]

    def row(self, i: int) -> dict[int, float]:
        """{j: W[i, j]}, the node's own id included, ascending by id; nonnegative, sums to 1."""
        return self.rows(i)

    def dense(self) -> np.ndarray:
        """(n, n) float64."""
        dense = np.zeros((self.n, self.n))
        for i in range(self.n):
            row = self.rows(i)
            dense[i, list(row)] = list(row.values())
        return dense

    def check_doubly_stochastic(self, tolerance: float = TOLERANCE) -> None:
        """Entries >= 0, rows and columns that sum to 1 within tolerance; else ConfigError names the one."""
        columns = np.zeros(self.n)
        for i in range(self.n):
            row = self.rows(i)
            values = np.fromiter(row.values(), np.float64, len(row))
            _check_entries(self.name, i, values, tolerance)
            columns[list(row)] += values
        for j in np.flatnonzero(~(np.abs(columns - 1) <= tolerance)):
            raise ConfigError(KEY, self.name, f"columns that sum to 1; column {j} sums to {columns[j]:.9g}")

    def second_eigenvalue(self) -> float:
        """The second largest |eigenvalue|: 0 averages at once, near 1 mixes slowly, 1 never agrees.

        From the dense matrix, O(n^3): for planning and reports over up to some thousands of nodes.
        """
        dense = self.dense()
        symmetric = np.array_equal(dense, dense.T)
        values = np.linalg.eigvalsh(dense) if symmetric else np.linalg.eigvals(dense)
        return float(np.sort(np.abs(values))[-2]) if self.n > 1 else 0.0


def metropolis(topology: Topology) -> MixingMatrix:
    """W[i, j] = 1 / (1 + max(degree i, degree j)) for neighbors, the rest to the node itself.

    Symmetric and doubly stochastic on every graph.
    Source: Metropolis weights, Xiao, Boyd, Lall 2006 (Distributed average consensus with time-varying
    Metropolis weights), eq. 3.
    """
    degrees = [topology.degree(i) for i in range(topology.n)]

    def row(i: int) -> dict[int, float]:
        own = degrees[i]
        shares = {j: 1.0 / (1 + max(own, degrees[j])) for j in topology.neighbors(i)}
        return _with_own(i, shares, 1.0 - sum(shares.values()))

    return uniform(topology) if topology.is_complete else MixingMatrix("metropolis", topology.n, row)


def uniform(topology: Topology) -> MixingMatrix:
    """Equal shares for a node and its neighbors: 1/n on a complete graph, 1/(degree + 1) on a regular one.

    Raises ConfigError for other graphs, where equal shares would drift from the average.
    """
    if not topology.is_regular:
        raise ConfigError(KEY, "uniform", f"a regular topology; {topology.name} is not, take metropolis")
    share = 1.0 / (topology.degree(0) + 1)
    if topology.is_complete:
        return MixingMatrix("uniform", topology.n, lambda i: dict.fromkeys(range(topology.n), share))
    return MixingMatrix(
        "uniform", topology.n, lambda i: _with_own(i, dict.fromkeys(topology.neighbors(i), share), share)
    )


def from_file(path: Path, topology: Topology) -> MixingMatrix:
    """W from a .csv (comma-separated rows) or .npy file.

    Checked to be (n, n), nonnegative, with rows and columns that sum to 1 within 1e-6, and zero where
    the topology has no edge. Raises ConfigError, naming the row.
    """
    dense = _load(path)
    n = topology.n
    if dense.shape != (n, n):
        raise ConfigError(KEY, str(path), f"a matrix of {n} x {n} for {n} nodes; it is {_shape(dense)}")
    for i in range(n):
        outside = set(np.flatnonzero(dense[i]).tolist()) - {i, *topology.neighbors(i)}
        if outside:
            raise ConfigError(
                KEY, str(path), f"zero where there is no edge; row {i} takes from {min(outside)}"
            )
    rows = [{int(j): float(dense[i, j]) for j in np.flatnonzero(dense[i])} for i in range(n)]
    matrix = MixingMatrix(str(path), n, lambda i: _with_own(i, rows[i], rows[i].get(i, 0.0)))
    matrix.check_doubly_stochastic()
    return matrix


def make_mixing(name: str, topology: Topology) -> MixingMatrix:
    """By name, metropolis or uniform, or from the path of a .csv or .npy file."""
    if Path(name).suffix in (".csv", ".npy"):
        return from_file(Path(name), topology)
    makers = {"metropolis": metropolis, "uniform": uniform}
    if name not in makers:
        raise ConfigError(KEY, name, f"{nearest(name, makers)}, or a .csv or .npy file")
    return makers[name](topology)


def _with_own(i: int, shares: dict[int, float], own: float) -> dict[int, float]:
    """A fresh row in ascending order of id: sums over it are the same however it was made."""
    return dict(sorted({**shares, i: own}.items()))


def _load(path: Path) -> np.ndarray:
    try:
        if path.suffix == ".npy":
            loaded: np.ndarray = np.load(path, allow_pickle=False)
        else:
            lines = path.read_text(encoding="utf-8").split("\n")
            rows = [[float(word) for word in line.split(",")] for line in lines if line.strip()]
            loaded = np.array(rows, dtype=np.float64)
        return loaded.astype(np.float64)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(KEY, str(path), f"a readable .csv or .npy matrix ({error})") from error


def _shape(dense: np.ndarray) -> str:
    return " x ".join(map(str, dense.shape)) or "a single number"


def _check_entries(name: str, i: int, values: np.ndarray, tolerance: float) -> None:
    if not (values >= 0).all():
        raise ConfigError(KEY, name, f"entries >= 0; row {i} holds {values[~(values >= 0)][0]:.9g}")
    if not abs(values.sum() - 1) <= tolerance:
        raise ConfigError(KEY, name, f"rows that sum to 1; row {i} sums to {values.sum():.9g}")
