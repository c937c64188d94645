"""Many stacks of dense layers, trained or evaluated side by side, without autograd.

Legend of shape suffixes: G models side by side, B examples of a batch, D a layer's inputs, U its
units, P parameters, K targets. Models lie as rows of a (G, P) matrix; a step is one batched matrix
product per layer and pass, and one optimiser operation on the whole matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgefl.data import Batch, Dataset
from edgefl.learning import tasks
from edgefl.learning.learner import Learner, check_examples, check_steps, value_of
from edgefl.learning.model import Model
from edgefl.learning.models.dense import Dense
from edgefl.learning.work import (
    Evaluate,
    Evaluation,
    Gradient,
    GradientResult,
    LocalSGD,
    Trained,
    Work,
)
from edgefl.parameters import Vector


@dataclass(frozen=True)
class Layer:
    """Where one dense layer lies in the vector, and whether a ReLU follows."""

    weight: slice
    bias: slice
    inputs: int
    units: int
    relu: bool


def dense_layers(model: Model) -> tuple[Layer, ...] | None:
    """The layers of a model that is nothing but dense ones, for float32 inputs; else None."""
    blocks = list(model.build())
    if model.task == "language" or model.layout.dtype is not torch.float32:
        return None
    layers = []
    for name, block in zip(model.blocks, blocks, strict=True):
        if type(block) is not Dense:
            return None
        weight, bias = model.layout.slice(f"{name}.weight"), model.layout.slice(f"{name}.bias")
        layers.append(Layer(weight, bias, block.in_features, block.out_features, block.relu))
    return tuple(layers)


class Batches:
    """The mini-batches of several nodes, step by step, from one data set.

    index_GSB: rows of the data set; where a batch is short, its first example fills up, at weight 0.
    weight_GSB: of each example in its batch's mean, or None when all batches are full.
    """

    def __init__(self, dataset: Dataset, rows: Sequence[Sequence[Any]], batch_size: int) -> None:
        """rows: for each node, the index arrays of its steps; nodes with more steps first."""
        self.dataset, self.num_nodes = dataset, [0] * len(rows[0])
        for node in rows:
            self.num_nodes[len(node) - 1] += 1
        for step in range(len(self.num_nodes) - 2, -1, -1):
            self.num_nodes[step] += self.num_nodes[step + 1]
        self._rows, self.batch_size = rows, batch_size

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        raise NotImplementedError
