"""Sets of time intervals: their union, and how each node used its time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgefl.experiment.report.read import Floats, RunFiles, Spans


def union(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """The intervals [start, end], merged where they overlap or touch; ascending.

    >>> [part.tolist() for part in union(np.array([2.0, 0.0, 1.0]), np.array([3.0, 1.5, 1.7]))]
    [[0.0, 2.0], [1.7, 3.0]]
    """
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], end[last]


def covered_s(*spans: Spans) -> float:
    """Seconds that lie in at least one of the spans."""
    start, end = union(np.concatenate([s.start_s for s in spans]), np.concatenate([s.end_s for s in spans]))
    return float((end - start).sum())


@dataclass(frozen=True)
class Use:
    """A node's time in seconds: computing, sending meanwhile or not, sending and not computing."""

    computing_s: float
    sending_s: float
    only_sending_s: float


def uses(run: RunFiles) -> dict[int, Use]:
    """How each node used its time; from nodes.csv alone where a node has no spans."""
    found = {node.id: Use(min(node.busy_s, run.time_s), 0.0, 0.0) for node in run.nodes}
    for node, spans in run.spans.by_node.items():
        compute, send = spans.of_kind("compute"), spans.of_kind("send")
        computing, either = covered_s(compute), covered_s(compute, send)
        found[node] = Use(computing, covered_s(send), either - computing)
    return found
