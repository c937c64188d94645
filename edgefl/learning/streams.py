"""The mini-batches of several nodes from one data set, gathered for steps side by side.

Legend of shape suffixes: S steps, G nodes, B examples of a batch, D inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from edgefl.data import LocalData, WeightedData

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
        table = [data.rows(steps, batch_size) for data, steps in nodes]
        width = max(rows.shape[1] for rows in table)
        index = np.zeros((len(table[0]), len(table), width), np.int64)
        for g, rows in enumerate(table):
            # Where a batch is short its own first example fills it up, at weight 0.
            index[: len(rows), g] = rows if rows.shape[1] == width else _widened(rows, width)
        sizes = _sizes(nodes, batch_size)
        weight = (np.arange(width) < sizes[:, :, np.newaxis]) / np.maximum(sizes, 1)[:, :, np.newaxis]
        for g, (data, steps) in enumerate(nodes):
            if isinstance(data, WeightedData):
                own = weight[: len(steps), g]
                own *= data.weights_of(index[: len(steps), g])
                own /= own.sum(1, keepdims=True)
        self.index = torch.from_numpy(index).to(x.device)
        self.weight = torch.from_numpy(weight.astype(np.float32)).to(x.device)
        self.active: list[int] = np.count_nonzero(sizes, axis=1).tolist()
        self.at_once = max(1, _AT_ONCE // (len(table) * width * x.shape[1]))


def _widened(rows: np.ndarray, width: int) -> np.ndarray:
    return np.concatenate([rows, np.repeat(rows[:, :1], width - rows.shape[1], axis=1)], axis=1)


def _sizes(nodes: Sequence[tuple[LocalData, range]], batch_size: int) -> np.ndarray:
    """(S, G) examples in each node's batches, the last of an epoch smaller; 0 where it has no such step."""
    table = [(len(data), steps.start, len(steps)) for data, steps in nodes]
    num_examples, start, count = np.array(table).T
    per_epoch = -(-num_examples // batch_size)
    place = np.arange(count.max())[:, np.newaxis]
    is_last = (start + place) % per_epoch == per_epoch - 1
    sizes = np.where(is_last, num_examples - (per_epoch - 1) * batch_size, batch_size)
    return np.where(place < count, sizes, 0)
