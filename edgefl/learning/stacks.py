"""Stacks of dense layers as rows of a matrix, and what passes through them side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.data import Task
from edgefl.learning.model import Model
from edgefl.learning.models.dense import Dense
from edgefl.learning.passes import compiled
from edgefl.learning.streams import Streams


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
    if model.task == "language" or model.layout.dtype is not torch.float32:
        return None
    layers = []
    for name, block in zip(model.blocks, model.build(), strict=True):
        if type(block) is not Dense:
            return None
        weight, bias = model.layout.slice(f"{name}.weight"), model.layout.slice(f"{name}.bias")
        layers.append(Layer(weight, bias, block.in_features, block.out_features, block.relu))
    return tuple(layers)


class Stacks:
    """What is done with models of one shape that lie as rows of a matrix, values (G, P), only to be read."""

    def __init__(self, task: Task, layers: tuple[Layer, ...]) -> None:
        places = [[at.weight.start, at.bias.start, at.units, at.inputs] for at in layers]
        self._shape = places, [at.relu for at in layers], task == "regression"
        self._passes = compiled()

    def train(self, values: Tensor, streams: Streams, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Plain SGD at rates (G,): the new models, and the sum of each one's losses over its steps, (G,)."""
        s = streams
        found: tuple[Tensor, Tensor] = self._passes.train(
            values, *self._shape, s.x, s.y, s.index, s.weight, rates, s.active, s.at_once
        )
        return found

    def gradients(self, values: Tensor, streams: Streams, step: int = 0) -> tuple[Tensor, Tensor]:
        """At one step of streams, of the first so many models: the gradients, and the losses, (G,)."""
        s, a = streams, len(values)
        index, weight = s.index[step, :a], s.weight[step, :a]
        found: tuple[Tensor, Tensor] = self._passes.gradients(values, *self._shape, s.x, s.y, index, weight)
        return found

    def evaluate(self, values: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """On examples x (n, D), y (n, ...), the same for all: sums of losses and of right classes, (G,)."""
        found: tuple[Tensor, Tensor] = self._passes.evaluate(values, *self._shape, x, y)
        return found
