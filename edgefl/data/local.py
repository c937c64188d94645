"""A node's own share of a data set: functions of (seed, node, index), without a cursor."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from edgefl.data.dataset import Dataset
from edgefl.keyed import generator

_BLOCK, _MOST_EPOCHS = 512, 16
"""Examples that a node draws the order of at once, and epochs: a generator costs as much as 500 of them."""


@dataclass(frozen=True)
class Batch:
    """x: (B, ...) inputs; y: (B, ...) targets."""

    x: Tensor
    y: Tensor

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
    _latest: tuple[int, list[np.ndarray]] = field(default=(-1, []), init=False, repr=False)
    """The block of epochs asked for last and their orders: a step costs a slice."""

    def __len__(self) -> int:
        return len(self.indices)

    def steps_per_epoch(self, batch_size: int) -> int:
        return math.ceil(len(self) / batch_size)

    def epoch(self, epoch: int) -> np.ndarray:
        """(n,) indices into the data set, in this epoch's order."""
        at_once = max(1, min(_MOST_EPOCHS, _BLOCK // max(1, len(self))))
        block, place = divmod(epoch, at_once)
        latest, orders = self._latest
        if latest != block:
            rng = generator(self.seed, "epoch", self.node, block)
            if at_once == 1:
                orders = [rng.permutation(self.indices)]
            else:
                orders = list(rng.permuted(np.broadcast_to(self.indices, (at_once, len(self))), axis=1))
            object.__setattr__(self, "_latest", (block, orders))
        return orders[place]

    def batch_indices(self, step: int, batch_size: int) -> np.ndarray:
        """(B,) indices of the step-th mini-batch, B <= batch_size. Raises ValueError without data."""
        return self.batches(range(step, step + 1), batch_size)[0]

    def batches(self, steps: range, batch_size: int) -> list[np.ndarray]:
        """The indices of consecutive mini-batches, as `batch_indices` gives them one by one."""
        size = len(self.indices)
        if not size:
            raise ValueError(f"node {self.node} has no data")
        per_epoch = -(-size // batch_size)
        epoch, place = divmod(steps.start, per_epoch)
        found, order = [], self.epoch(epoch)
        for _ in steps:
            if place == per_epoch:
                epoch, place = epoch + 1, 0
                order = self.epoch(epoch)
            found.append(order[place * batch_size : (place + 1) * batch_size])
            place += 1
        return found

    def batch(self, step: int, batch_size: int) -> Batch:
        """The step-th mini-batch of the endless stream of reshuffled epochs."""
        return self.take(self.batch_indices(step, batch_size))

    def take(self, indices: np.ndarray) -> Batch:
        """The examples at these indices of the data set."""
        places = torch.from_numpy(indices)
        return Batch(
            self.dataset.x_train.index_select(0, places), self.dataset.y_train.index_select(0, places)
        )
