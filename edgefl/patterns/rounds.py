"""Beginning a round: somebody to ask, and the cohort."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgefl.nodes import Back, Node


def cohort(rng: np.random.Generator, ids: Sequence[int], size: int) -> list[int]:
    """`size` of `ids` uniformly without replacement, ascending; all of them when size is their number."""
    if size >= len(ids):
        return list(ids)
    return sorted(int(i) for i in rng.choice(np.asarray(ids), size, replace=False))


async def somebody_alive(node: Node, ids: Sequence[int]) -> None:
    """Wait for one of `ids` to return while all of them are gone; at once where one lives.

    Without it a server whose clients are all gone would run through its void rounds in no time.
    """
    while not any(node.fleet.alive(j) for j in ids):
        await node.receive(Back, sender=ids)
