"""A data set in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

Task = Literal["classification", "regression", "language"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples.

    x_train: (n, *input_shape) float32, or (n, length) int64 tokens. y_train: (n,) int64 labels,
    (n, length) next tokens, or (n, targets) float32. owners: (n,) natural owner of each example, if any.
    """

    name: str
    task: Task
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    num_classes: int
    owners: np.ndarray | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.x_train.shape[1:])
