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
            index, weight = (np.concatenate(tables, axis=1) for tables in zip(*cuts, strict=True))
            index, weight = index.reshape(num_steps, -1, width), weight.reshape(num_steps, -1, width)
        else:
            lengths = np.array([len(rows) for rows, _ in cuts])
            self.active = np.count_nonzero(lengths > np.arange(num_steps)[:, np.newaxis], axis=1).tolist()
            index, weight = _filled_up(cuts, num_steps, max(rows.shape[1] for rows, _ in cuts))
        self.index = torch.from_numpy(index).to(x.device)
        self.weight = torch.from_numpy(weight).to(x.device)
        self.at_once = max(1, _AT_ONCE // (index[0].size * x.shape[1]))


def _filled_up(
    cuts: Sequence[tuple[np.ndarray, np.ndarray]], num_steps: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Batches of unequal widths and numbers side by side: a short one is filled up with its own first
    example, at weight 0, and where a node has no such step all weights are 0."""
    shape = num_steps, len(cuts), width
    index, weight = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for g, (rows, weights) in enumerate(cuts):
        steps, own = rows.shape
        index[:steps, g, :own], weight[:steps, g, :own] = rows, weights
        index[:steps, g, own:] = rows[:, :1]
    return index, weight
