"""A node's own share of a data set: functions of (seed, node, index), without a cursor."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from edgefl.data.dataset import Dataset
from edgefl.keyed import generator


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
    cut into batches of `batch_size`, the last one smaller. Step k of the endless stream of batches is
    the same whenever, wherever and in whatever order it is asked for.
    """

    dataset: Dataset
    indices: np.ndarray
    node: int
    seed: int
    _latest: tuple[int, np.ndarray] = field(default=(-1, np.zeros(0, np.int64)), init=False, repr=False)
    """The epoch asked for last and its order: a step costs a slice, and a node keeps one permutation."""

    def __len__(self) -> int:
        return len(self.indices)

    def steps_per_epoch(self, batch_size: int) -> int:
        return math.ceil(len(self) / batch_size)

    def epoch(self, epoch: int) -> np.ndarray:
        """(n,) indices into the data set, in this epoch's order."""
        latest, order = self._latest
        if latest != epoch:
            order = generator(self.seed, "epoch", self.node, epoch).permutation(self.indices)
            object.__setattr__(self, "_latest", (epoch, order))
        return order

    def batch_indices(self, step: int, batch_size: int) -> np.ndarray:
        """(B,) indices of the step-th mini-batch, B <= batch_size. Raises ValueError without data."""
        if not len(self):
            raise ValueError(f"node {self.node} has no data")
        epoch, place = divmod(step, self.steps_per_epoch(batch_size))
        return self.epoch(epoch)[place * batch_size : (place + 1) * batch_size]

    def batch(self, step: int, batch_size: int) -> Batch:
        """The step-th mini-batch of the endless stream of reshuffled epochs."""
        return self.take(self.batch_indices(step, batch_size))

    def take(self, indices: np.ndarray) -> Batch:
        """The examples at these indices of the data set."""
        places = torch.from_numpy(indices)
        return Batch(
            self.dataset.x_train.index_select(0, places), self.dataset.y_train.index_select(0, places)
        )
