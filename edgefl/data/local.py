"""A node's own share of a data set: functions of (seed, node, index), without a cursor."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from edgefl.data.dataset import Dataset
from edgefl.keyed import generator

_BLOCK, _MOST_EPOCHS = 512, 64
"""Examples that a node draws the order of at once, and epochs: a generator costs as much as 500 of them."""
_WIDTHS = 4


@dataclass(frozen=True)
class Batch:
    """x: (B, ...) inputs; y: (B, ...) targets; weight: (B,) float32, of each in the batch's mean, all alike
    where None."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, eq=False)
class LocalData:
    """The examples of one node: `indices` into a data set's training part.

    Mini-batches come from reshuffled epochs: each epoch is a permutation keyed by (seed, node, epoch),
    cut into batches of `batch_size`, the last one smaller. Small nodes draw a block of epochs at once.
    Step k of the endless stream of batches is the same whenever, wherever and in whatever order it is asked
    for.
    """

    dataset: Dataset
    indices: np.ndarray
    node: int
    seed: int
    _latest: tuple[int, np.ndarray] = field(default=(-1, np.empty(0)), init=False, repr=False)
    """The block of epochs asked for last and their orders, (epochs, n)."""
    _cut: tuple[int, int, np.ndarray, np.ndarray] = field(
        default=(-1, 0, np.empty(0), np.empty(0)), init=False, repr=False
    )
    """A block, a batch size, and the block's mini-batches as `cut` gives them: a step costs two slices."""

    def __len__(self) -> int:
        return len(self.indices)

    def steps_per_epoch(self, batch_size: int) -> int:
        return -(-len(self.indices) // batch_size)

    @property
    def _at_once(self) -> int:
        """Epochs in a block."""
        return max(1, min(_MOST_EPOCHS, _BLOCK // max(1, len(self.indices))))

    def epoch(self, epoch: int) -> np.ndarray:
        """(n,) indices into the data set, in this epoch's order."""
        block, place = divmod(epoch, self._at_once)
        order: np.ndarray = self._orders(block)[place]
        return order

    def _orders(self, block: int) -> np.ndarray:
        """(epochs, n) the orders of a block of epochs."""
        latest, orders = self._latest
        if latest != block:
            rng = generator(self.seed, "epoch", self.node, block)
            orders = np.empty((self._at_once, len(self.indices)), np.int64)
            orders[:] = self.indices
            if self._at_once == 1:
                rng.shuffle(orders[0])
            else:
                rng.permuted(orders, axis=1, out=orders)
            object.__setattr__(self, "_latest", (block, orders))
        return orders

    def cut(self, steps: range, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """(S, W) the indices of consecutive mini-batches; and (S, W) float32, of each example in its batch's
        mean. A short batch is filled up with its own first example, of weight 0.

        W: batch_size, or the node's examples rounded up to a multiple of 4 where that is less: products over
        13 to 15 examples measured no faster than over 16. Both only to be read. Raises ValueError without
        data.
        """
        per_epoch = self.steps_per_epoch(batch_size)
        if not per_epoch:
            raise ValueError(f"node {self.node} has no data")
        each = self._at_once * per_epoch
        first, last = steps.start // each, (steps.stop - 1) // each
        rows, weights = self._cut_block(first, batch_size)
        if first < last:
            blocks = [self._cut_block(block, batch_size) for block in range(first, last + 1)]
            rows, weights = (np.concatenate(tables) for tables in zip(*blocks, strict=True))
        here = slice(steps.start - first * each, steps.stop - first * each)
        return rows[here], weights[here]

    def _cut_block(self, block: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """(steps, W) the rows and weights of a block of epochs."""
        latest, size, rows, weights = self._cut
        if latest != block or size != batch_size:
            rows, n = self._orders(block), len(self.indices)
            last = (self.steps_per_epoch(batch_size) - 1) * batch_size
            width = min(batch_size, -(-n // _WIDTHS) * _WIDTHS)
            if last + width > n:
                orders, rows = rows, np.empty((len(rows), last + width), np.int64)
                rows[:, :n], rows[:, n:] = orders, orders[:, last, np.newaxis]
            rows = rows.reshape(-1, width)
            weights = self._weights_in(rows, batch_size)
            object.__setattr__(self, "_cut", (block, batch_size, rows, weights))
        return rows, weights

    def _weights_in(self, rows: np.ndarray, batch_size: int) -> np.ndarray:
        """The weights of the rows of a whole number of epochs."""
        return self._shares(rows, batch_size, "float32")

    def _shares(self, rows: np.ndarray, batch_size: int, dtype: str) -> np.ndarray:
        """Likewise, where all examples of a batch weigh the same; one array for all nodes of this size."""
        epoch = self.sizes(range(self.steps_per_epoch(batch_size)), batch_size)
        return _shares(tuple(epoch), *rows.shape, dtype)

    def sizes(self, steps: range, batch_size: int) -> list[int]:
        """Examples in each of these mini-batches."""
        per_epoch = self.steps_per_epoch(batch_size)
        last = len(self) - (per_epoch - 1) * batch_size
        return [last if step % per_epoch == per_epoch - 1 else batch_size for step in steps]

    def batch_indices(self, step: int, batch_size: int) -> np.ndarray:
        """(B,) indices of the step-th mini-batch, B <= batch_size. Raises ValueError without data."""
        return self.batches(range(step, step + 1), batch_size)[0]

    def batches(self, steps: range, batch_size: int) -> list[np.ndarray]:
        """The indices of consecutive mini-batches, as `batch_indices` gives them one by one."""
        rows, _ = self.cut(steps, batch_size)
        return [row[:size] for row, size in zip(rows, self.sizes(steps, batch_size), strict=True)]

    def batch(self, step: int, batch_size: int) -> Batch:
        """The step-th mini-batch of the endless stream of reshuffled epochs."""
        return self.take(self.batch_indices(step, batch_size))

    def take(self, indices: np.ndarray) -> Batch:
        """The examples at these indices of the data set."""
        places = torch.from_numpy(indices)
        return Batch(
            self.dataset.x_train.index_select(0, places), self.dataset.y_train.index_select(0, places)
        )


@dataclass(frozen=True, eq=False)
class WeightedData(LocalData):
    """Examples of which each stands for several others, as in a coreset; `indices` ascend.

    weights: (n,) float64, above 0, by place in `indices`. A mini-batch's loss is the mean of its examples'
    losses with these weights.
    """

    weights: np.ndarray = field(kw_only=True)

    def weights_of(self, indices: np.ndarray) -> np.ndarray:
        """The weights of the examples at these indices of the data set."""
        found: np.ndarray = self.weights[np.searchsorted(self.indices, indices)]
        return found

    def _weights_in(self, rows: np.ndarray, batch_size: int) -> np.ndarray:
        own: np.ndarray = self.weights_of(rows) * self._shares(rows, batch_size, "float64")
        own /= own.sum(1, keepdims=True)
        return own.astype(np.float32)

    def take(self, indices: np.ndarray) -> Batch:
        batch = super().take(indices)
        return Batch(batch.x, batch.y, torch.from_numpy(self.weights_of(indices)).float())


@functools.lru_cache(64)
def _shares(epoch: tuple[int, ...], steps: int, width: int, dtype: str) -> np.ndarray:
    """(steps, width), only to be read: 1 / size in the places of each batch's examples, then 0.

    epoch: the sizes of an epoch's batches.
    """
    sizes = np.tile(epoch, steps // len(epoch))[:, np.newaxis]
    return np.where(np.arange(width) < sizes, 1 / sizes, 0.0).astype(dtype)
