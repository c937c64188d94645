"""How long a round takes, by what programs publish: said alike of a run, its plan and its prediction."""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.nodes.method import Evaluates

Paces = Mapping[int, tuple[float, int]]
"""When each node reached the last step that it published, and which step, by node."""


def reached(paces: dict[int, tuple[float, int]], node: int, time_s: float, step: int) -> None:
    """A node has published. A model that changes again within a step leaves it when the step was reached."""
    if step > paces.get(node, (0.0, 0))[1]:
        paces[node] = time_s, step


def mean_round_s(paces: Paces, evaluates: Evaluates) -> float:
    """Mean seconds of a round, of one node at least.

    Where each node has a model of its own: the mean over the nodes of what a round took each, for they need
    not end together. A model in parts has ended a round when the slowest part has.

    >>> paces = {0: (8.0, 4), 1: (16.0, 4)}
    >>> mean_round_s(paces, "each"), mean_round_s(paces, "parts")
    (3.0, 4.0)
    """
    each = [time_s / step for time_s, step in paces.values()]
    return max(each) if evaluates == "parts" else sum(each) / len(each)


def mean_rounds(paces: Paces) -> float:
    """Rounds that a node has published, in the mean."""
    return sum(step for _, step in paces.values()) / len(paces)
