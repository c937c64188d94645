"""The mini-batches of several nodes from one data set, gathered for steps side by side.

Legend of shape suffixes: S steps, G nodes, B examples of a batch, D inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edgefl.data import LocalData

_AT_ONCE = 1 << 18
"""Inputs gathered at a time, at most, unless one step takes more: 1 MB, which stays in a core's cache."""


@dataclass(frozen=True)
class Chunk:
    """Some steps. active: how many nodes have each, the first ones. Of those that have the first of them:
    x (S, G, B, D), y (S, G, B, ...); weight (S, G, B) of each example in its batch's mean, 0 for filling."""

    active: list[int]
    x: Tensor
    y: Tensor
    weight: Tensor


class Streams:
    """The mini-batches of several nodes, some steps at a time; nodes with more steps come first."""

    def __init__(
        self, x: Tensor, y: Tensor, nodes: Sequence[tuple[LocalData, range]], batch_size: int
    ) -> None:
        """x (n, D), y (n, ...): the data set. nodes: data and steps of each."""
        self._x, self._y = x, y
        self.num_nodes, self.num_steps = len(nodes), len(nodes[0][1])
        table = [data.rows(steps, batch_size) for data, steps in nodes]
        width = max(rows.shape[1] for rows in table)
        index = np.zeros((self.num_steps, self.num_nodes, width), np.int64)
        for g, rows in enumerate(table):
            # Where a batch is short its own first example fills it up, at weight 0.
            index[: len(rows), g] = rows if rows.shape[1] == width else _widened(rows, width)
        sizes = _sizes(nodes, batch_size)
        weight = (np.arange(width) < sizes[:, :, np.newaxis]) / np.maximum(sizes, 1)[:, :, np.newaxis]
        self._index_SGB = torch.from_numpy(index).to(x.device)
        self._weight_SGB = torch.from_numpy(weight.astype(np.float32)).to(x.device)
        self._active: list[int] = np.count_nonzero(sizes, axis=1).tolist()

    def __iter__(self) -> Iterator[Chunk]:
        width, inputs = self._index_SGB.shape[-1], self._x.shape[1]
        at_once = max(1, _AT_ONCE // (self.num_nodes * width * inputs))
        for start in range(0, self.num_steps, at_once):
            steps = slice(start, min(start + at_once, self.num_steps))
            index_SGB = self._index_SGB[steps, : self._active[start]]
            index, shape = index_SGB.flatten(), index_SGB.shape
            yield Chunk(
                self._active[steps],
                self._x.index_select(0, index).view(*shape, -1),
                self._y.index_select(0, index).view(*shape, *self._y.shape[1:]),
                self._weight_SGB[steps, : self._active[start]],
            )


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
