"""The topologies that have names, and those from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from edgefl.errors import ConfigError, nearest
from edgefl.keyed import generator
from edgefl.network.topology import CompleteRows, Topology

T = TypeVar("T")
REDRAWS = 100
"""Random graphs drawn at most until one is connected; each redraw is keyed by its number."""
KEY = "network.topology"


class TopologyConfig(BaseModel):
    """The [network.topology] table. A plain name stands for a table with that name alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "ring"
    """ring, torus, star, complete, bipartite-complete, exponential, random-regular, erdos-renyi or file."""
    rows: int | None = Field(default=None, gt=0)
    """torus: rows of the grid; as square as the number of nodes allows where not given."""
    degree: int | None = Field(default=None, ge=0)
    """random-regular: neighbors of each node."""
    edge_probability: float | None = Field(default=None, ge=0, le=1)
    """erdos-renyi: probability that a pair is joined."""
    file: Path | None = None
    """file: an edge list, "i j" per line, or JSON, [[i, j], ...] or {"edges": [[i, j], ...]}."""


def make_topology(config: TopologyConfig | str, n: int, seed: int = 0) -> Topology:
    """The graph over nodes 0..n-1 that a table, a name or the path of a graph file stands for.

    seed: what random graphs are drawn from; they are connected. Raises ConfigError for what cannot be.

    >>> make_topology("ring", 4).adjacency
    ((1, 3), (0, 2), (1, 3), (0, 2))
    """
    if n < 1:
        raise ConfigError("nodes", n, "at least 1 node")
    config = _table(config) if isinstance(config, str) else config
    if config.name not in _MAKERS:
        raise ConfigError(f"{KEY}.name", config.name, nearest(config.name, _MAKERS))
    maker, own = _MAKERS[config.name]
    for key in sorted(set(TopologyConfig.model_fields) - {"name", *own}):
        if getattr(config, key) is not None:
            raise ConfigError(f"{KEY}.{key}", getattr(config, key), f"not for {config.name}: leave it out")
    return maker(config, n, seed)


def _table(text: str) -> TopologyConfig:
    if Path(text).suffix in (".txt", ".edges", ".json"):
        return TopologyConfig(name="file", file=Path(text))
    return TopologyConfig(name=text)


def _ring(config: TopologyConfig, n: int, seed: int) -> Topology:
    return Topology.of_edges("ring", n, ((i, (i + 1) % n) for i in range(n) if n > 1))


def _torus(config: TopologyConfig, n: int, seed: int) -> Topology:
    rows = config.rows or next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
    if n % rows or not 1 < rows < n:
        found = ("rows", config.rows) if config.rows else ("name", "torus")
        need = f"a grid of at least 2 x 2 with {n} nodes; "
        way = "no such grid exists, take another number of nodes" if _is_prime(n) else "rows must divide it"
        raise ConfigError(f"{KEY}.{found[0]}", found[1], need + way)
    columns = n // rows
    right = ((i, i - i % columns + (i + 1) % columns) for i in range(n))
    down = ((i, (i + columns) % n) for i in range(n))
    return Topology.of_edges("torus", n, (*right, *down))


def _is_prime(n: int) -> bool:
    return all(n % k for k in range(2, math.isqrt(n) + 1))


def _star(config: TopologyConfig, n: int, seed: int) -> Topology:
    return Topology.of_edges("star", n, ((0, i) for i in range(1, n)))


def _complete(config: TopologyConfig, n: int, seed: int) -> Topology:
    return Topology("complete", CompleteRows(n))


def _bipartite_complete(config: TopologyConfig, n: int, seed: int) -> Topology:
    """Even ids against odd ones, AD-PSGD's passive and active (Lian et al. 2018); a side shares one row."""
    even, odd = tuple(range(0, n, 2)), tuple(range(1, n, 2))
    return Topology("bipartite-complete", tuple(even if i % 2 else odd for i in range(n)))


def _exponential(config: TopologyConfig, n: int, seed: int) -> Topology:
    """Neighbors at distances 1, 2, 4, ... below n, both ways round (Ying et al. 2021, arXiv:2110.13363)."""
    hops = [2**k for k in range((n - 1).bit_length())]
    return Topology.of_edges("exponential", n, ((i, (i + hop) % n) for i in range(n) for hop in hops))


def _random_regular(config: TopologyConfig, n: int, seed: int) -> Topology:
    degree = _needed("degree", config.degree, config.name)
    if degree >= n or degree * n % 2:
        raise ConfigError(
            f"{KEY}.degree", degree, f"a degree below {n} with degree x nodes ({degree} x {n}) even"
        )
    if 2 * degree >= n:  # the complement is sparser, and drawn at once; a graph as dense as this is connected
        missing = _first_connected(config, n, seed, n - 1 - degree, connected=False)
        rows = tuple(
            tuple(j for j in range(n) if j != i and j not in absent)
            for i, absent in enumerate(map(set, missing.adjacency))
        )
        return Topology("random-regular", rows)
    return _first_connected(config, n, seed, degree, connected=True)


def _first_connected(config: TopologyConfig, n: int, seed: int, degree: int, *, connected: bool) -> Topology:
    for draw in range(REDRAWS):
        edges = _regular_edges(n, degree, generator(seed, "random-regular", n, degree, draw))
        if edges is None:
            continue
        topology = Topology.of_edges("random-regular", n, edges)
        if not connected or topology.is_connected():
            return topology
    found = f"no connected graph in {REDRAWS} draws over {n} nodes; 3 or more connects"
    raise ConfigError(f"{KEY}.degree", config.degree, found)


def _regular_edges(n: int, degree: int, rng: np.random.Generator) -> set[tuple[int, int]] | None:
    """Join stubs in random pairs, those that did not fit again (Steger, Wormald 1999); None at a dead end."""
    edges: set[tuple[int, int]] = set()
    stubs = np.repeat(np.arange(n), degree)
    while len(stubs):
        rest: list[int] = []
        shuffled = rng.permutation(stubs).tolist()
        for a, b in zip(shuffled[::2], shuffled[1::2], strict=True):
            pair = (min(a, b), max(a, b))
            if a == b or pair in edges:
                rest += pair
            else:
                edges.add(pair)
        if rest and not _can_go_on(sorted(set(rest)), edges):
            return None
        stubs = np.array(rest, dtype=np.int64)
    return edges


def _can_go_on(nodes: list[int], edges: set[tuple[int, int]]) -> bool:
    return any((a, b) not in edges for k, a in enumerate(nodes) for b in nodes[k + 1 :])


def _erdos_renyi(config: TopologyConfig, n: int, seed: int) -> Topology:
    p = _needed("edge_probability", config.edge_probability, config.name)
    for draw in range(REDRAWS if p > 0 or n == 1 else 0):
        chosen = _bernoulli_hits(n * (n - 1) // 2, p, generator(seed, "erdos-renyi", n, draw))
        topology = Topology.of_edges("erdos-renyi", n, _pairs(chosen))
        if topology.is_connected():
            return topology
    way = f"take more than log(n)/n = {math.log(n) / n:.3g}"
    raise ConfigError(
        f"{KEY}.edge_probability", p, f"no connected graph in {REDRAWS} draws over {n} nodes; {way}"
    )


def _bernoulli_hits(trials: int, p: float, rng: np.random.Generator) -> np.ndarray:
    """Which of so many trials succeed, in time that grows with the hits (Batagelj and Brandes 2005)."""
    if not trials or not p:
        return np.zeros(0, dtype=np.int64)
    hits: list[np.ndarray] = []
    last = -1
    while last < trials:
        size = int((trials - last) * p * 1.1) + 16
        gaps = np.minimum(rng.geometric(p, size), trials + 1)  # a gap may be as large as int64 allows
        hits.append(last + np.cumsum(gaps))
        last = int(hits[-1][-1])
    places = np.concatenate(hits)
    return places[places < trials]


def _pairs(places: np.ndarray) -> Iterator[tuple[int, int]]:
    """Place k among the pairs (0,1), (0,2), (1,2), (0,3), ... as ids."""
    high = ((1 + np.sqrt(1 + 8 * places.astype(np.float64))) / 2).astype(np.int64)
    high -= high * (high - 1) // 2 > places  # a root that was rounded up
    high += high * (high + 1) // 2 <= places  # or down
    return zip((places - high * (high - 1) // 2).tolist(), high.tolist(), strict=True)


def _from_file(config: TopologyConfig, n: int, seed: int) -> Topology:
    path = _needed("file", config.file, config.name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY}.file", str(path), f"a readable graph file ({error})") from error
    edges = _json_edges(text, path) if path.suffix == ".json" else _text_edges(text, path)
    for where, edge in edges:
        if not _is_edge(edge, n):
            raise ConfigError(f"{KEY}.file", f"{path}, {where}", f"two different ids from 0 to {n - 1}")
    return Topology.of_edges("file", n, [(edge[0], edge[1]) for _, edge in edges])


def _is_edge(edge: list[int], n: int) -> bool:
    whole = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < n for i in edge)
    return len(edge) == 2 and whole and edge[0] != edge[1]


def _json_edges(text: str, path: Path) -> list[tuple[str, list[int]]]:
    try:
        loaded = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{KEY}.file", str(path), f"JSON: {error}") from error
    edges = loaded.get("edges") if isinstance(loaded, dict) else loaded
    if not isinstance(edges, list) or not all(isinstance(edge, list) for edge in edges):
        raise ConfigError(f"{KEY}.file", str(path), 'JSON with [[i, j], ...] or {"edges": [[i, j], ...]}')
    return [(f"edge {k}", edge) for k, edge in enumerate(edges)]


def _text_edges(text: str, path: Path) -> list[tuple[str, list[int]]]:
    edges = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not all(word.isdecimal() for word in words):
            raise ConfigError(f"{KEY}.file", f"{path}, line {number}: {line.strip()}", 'two ids, "i j"')
        if words:
            edges.append((f"line {number}", [int(word) for word in words]))
    return edges


def _needed(key: str, value: T | None, name: str) -> T:
    if value is None:
        raise ConfigError(f"{KEY}.{key}", None, f"{name} needs it")
    return value


_MAKERS: dict[str, tuple[Callable[[TopologyConfig, int, int], Topology], tuple[str, ...]]] = {
    "ring": (_ring, ()),
    "torus": (_torus, ("rows",)),
    "star": (_star, ()),
    "complete": (_complete, ()),
    "bipartite-complete": (_bipartite_complete, ()),
    "exponential": (_exponential, ()),
    "random-regular": (_random_regular, ("degree",)),
    "erdos-renyi": (_erdos_renyi, ("edge_probability",)),
    "file": (_from_file, ("file",)),
}
