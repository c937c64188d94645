"""The mini-batches of several nodes from one data set, gathered for steps side by side.

Legend of shape suffixes: S steps, G nodes, B examples of a batch, D inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from edgefl.data import LocalData

_AT_ONCE = 1 << 18
"""Inputs gathered at a time, at most, unless one step takes more: 1 MB, which stays in a core's cache."""


class Streams:
    """The mini-batches of several nodes, step by step; nodes with more steps come first.

    x (n, D), y (n, ...): the data set. index (S, G, B): the batches in it. weight (S, G, B): of each example
    in its batch's mean, 0 where a batch is filled up, or a node has no such step. active: how many nodes have
    each step. at_once: steps whose examples should be gathered at a time.
    """

    def __init__(
        self, x: Tensor, y: Tensor, nodes: Sequence[tuple[LocalData, range]], batch_size: int
    ) -> None:
        """nodes: data and steps of each."""
        self.x, self.y = x, y
        cuts = [data.cut(steps, batch_size) for data, steps in nodes]
        num_steps, width = cuts[0][0].shape
        if all(rows.shape == (num_steps, width) for rows, _ in cuts):
            self.active = [len(cuts)] * num_steps
        else:
            self.active = [sum(len(rows) > step for rows, _ in cuts) for step in range(num_steps)]
            width = max(rows.shape[1] for rows, _ in cuts)
            cuts = [_fitted(rows, weights, num_steps, width) for rows, weights in cuts]
        index, weight = (np.concatenate(tables, axis=1) for tables in zip(*cuts, strict=True))
        shape = num_steps, len(cuts), width
        self.index = torch.from_numpy(index.reshape(shape)).to(x.device)
        self.weight = torch.from_numpy(weight.reshape(shape)).to(x.device)
        self.at_once = max(1, _AT_ONCE // (len(cuts) * width * x.shape[1]))


def _fitted(
    rows: np.ndarray, weights: np.ndarray, num_steps: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """A node's batches filled up: each with its own first example, at weight 0, and steps of nothing."""
    more = ((0, num_steps - len(rows)), (0, width - rows.shape[1]))
    index, weight = np.pad(rows, more), np.pad(weights, more)
    index[: len(rows), rows.shape[1] :] = rows[:, :1]
    return index, weight
