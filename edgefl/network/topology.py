"""Who is whose neighbor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from edgefl.errors import ConfigError


@dataclass(frozen=True)
class CompleteRows(Sequence[tuple[int, ...]]):
    """The adjacency of a complete graph, rows made when asked for: 10,000 nodes would hold 10^8 entries."""

    size: int

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, i: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[tuple[int, ...], ...]: ...
    def __getitem__(self, i: int | slice) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        if isinstance(i, slice):
            return tuple(self[k] for k in range(self.size)[i])
        node = range(self.size)[i]
        return (*range(node), *range(node + 1, self.size))


@dataclass(frozen=True)
class Topology:
    """An undirected graph over nodes 0..n-1, without loops."""

    name: str
    adjacency: Sequence[tuple[int, ...]]
    """adjacency[i]: the neighbors of i, ascending, without i."""

    @classmethod
    def of_edges(cls, name: str, n: int, edges: Iterable[tuple[int, int]]) -> Topology:
        """From pairs of different ids below n, in any order; a repeated pair counts once.

        >>> Topology.of_edges("path", 3, [(0, 1), (2, 1)]).adjacency
        ((1,), (0, 2), (1,))
        """
        rows: list[set[int]] = [set() for _ in range(n)]
        for i, j in edges:
            rows[i].add(j)
            rows[j].add(i)
        return cls(name, tuple(tuple(sorted(row)) for row in rows))

    @property
    def n(self) -> int:
        return len(self.adjacency)

    def neighbors(self, i: int) -> tuple[int, ...]:
        """Ids of i's neighbors, ascending."""
        return self.adjacency[i]

    def degree(self, i: int) -> int:
        """Number of i's neighbors."""
        return self.n - 1 if self.is_complete else len(self.adjacency[i])

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Every edge once, as (i, j) with i < j, ascending. A complete graph has n (n - 1) / 2 of them."""
        return tuple((i, j) for i in range(self.n) for j in self.adjacency[i] if i < j)

    @property
    def num_edges(self) -> int:
        return sum(self.degree(i) for i in range(self.n)) // 2

    @property
    def is_complete(self) -> bool:
        """Everybody is everybody's neighbor."""
        return isinstance(self.adjacency, CompleteRows) or all(len(a) == self.n - 1 for a in self.adjacency)

    @property
    def is_regular(self) -> bool:
        """All nodes have equally many neighbors."""
        return self.is_complete or len({len(row) for row in self.adjacency}) == 1

    def distances(self, source: int) -> dict[int, int]:
        """Hops from a node to each node that it can reach, itself at 0."""
        hops, front, unseen = {source: 0}, [source], set(range(self.n)) - {source}
        while front and unseen:
            reached: list[int] = []
            for node in front:
                found = unseen.intersection(self.adjacency[node])
                unseen -= found
                reached += found
                hops.update(dict.fromkeys(found, hops[node] + 1))
                if not unseen:
                    break
            front = reached
        return hops

    def is_connected(self) -> bool:
        return len(self.distances(0)) == self.n

    def diameter(self) -> int:
        """Hops between the two nodes farthest apart; ValueError for a graph in pieces. O(n x edges)."""
        if not self.is_connected():
            raise ValueError(f"topology {self.name} is not connected")
        if self.is_complete:
            return min(self.n - 1, 1)
        return max(max(self.distances(i).values()) for i in range(self.n))

    def is_bipartite(self) -> bool:
        return self._two_sides() is not None

    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The two sides of a bipartite graph, ascending: no edge lies within one.

        The lowest id of each component is on the first side. Raises ConfigError for other graphs.
        """
        found = self._two_sides()
        if found is None:
            raise ConfigError(
                "network.topology", self.name, "a bipartite graph (no odd cycle), such as bipartite-complete"
            )
        return tuple(sorted(found[0])), tuple(sorted(found[1]))

    def _two_sides(self) -> tuple[set[int], set[int]] | None:
        """Colour each component from its lowest id; None when an edge joins two of one colour."""
        sides: tuple[set[int], set[int]] = (set(), set())
        checked: dict[tuple[int, int], tuple[int, ...]] = {}
        for start in range(self.n):
            if start in sides[0] or start in sides[1]:
                continue
            sides[0].add(start)
            front = [(start, 0)]
            while front:
                node, side = front.pop()
                row = self.adjacency[node]
                if (id(row), side) in checked:  # a row that nodes of one side share needs one look
                    continue
                checked[id(row), side] = row
                if not sides[side].isdisjoint(row):
                    return None
                fresh = [j for j in row if j not in sides[1 - side]]
                sides[1 - side].update(fresh)
                front += [(j, 1 - side) for j in fresh]
        return sides
