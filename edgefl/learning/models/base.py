"""What all models of the registry share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from torch import nn

from edgefl.data import Dataset, Task

Blocks = tuple[tuple[str, Callable[[], nn.Module]], ...]


@dataclass(frozen=True)
class Problem:
    """What a data set asks of a model. num_outputs: classes, targets, or the vocabulary's size."""

    task: Task
    input_shape: tuple[int, ...]
    num_outputs: int

    @classmethod
    def of(cls, data: Dataset) -> Problem:
        """The problem that a data set poses."""
        if data.task != "regression":
            return cls(data.task, data.input_shape, data.num_classes)
        targets = data.y_train.shape[1:]
        return cls(data.task, data.input_shape, math.prod(targets))

    @property
    def num_inputs(self) -> int:
        return math.prod(self.input_shape)


class Options(BaseModel, ABC):
    """One model's own keys in the [model] table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def blocks(self, problem: Problem) -> Blocks:
        """Name and constructor of each block. Raises ConfigError where the model cannot solve it."""
