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
from edgefl.parameters.deferred import Order


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
    """What is done with G models of one shape side by side. Those that are not there yet are made in the same
    call."""

    def __init__(self, task: Task, layers: tuple[Layer, ...]) -> None:
        places = [[at.weight.start, at.bias.start, at.units, at.inputs] for at in layers]
        self._shape = places, [at.relu for at in layers], task == "regression"
        self._passes = compiled()

    def rows(self, models: Order) -> Tensor:
        """(G, P) the models, only to be read."""
        made, values = self._passes.stacked(models.ingredients)
        models.keep(made)
        return values  # type: ignore[no-any-return]

    def train(self, models: Order, streams: Streams, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Plain SGD at rates (G,): the new models, and the sum of each one's losses over its steps, (G,)."""
        s = streams
        made, new, loss, _ = self._passes.train(
            models.ingredients, *self._shape, s.x, s.y, s.index, s.weight, rates, s.active, s.at_once
        )
        models.keep(made)
        return new, loss

    def gradients(self, models: Order, streams: Streams) -> tuple[Tensor, Tensor]:
        """At the first step of streams: the gradients, (G, P), and the losses, (G,)."""
        s = streams
        made, slope, losses, _ = self._passes.gradients(
            models.ingredients, *self._shape, s.x, s.y, s.index[0], s.weight[0]
        )
        models.keep(made)
        return slope, losses

    def slopes(self, values: Tensor, streams: Streams, step: int) -> tuple[Tensor, Tensor]:
        """As `gradients`, at one step of streams, of the first so many models, rows of values (G, P)."""
        s, a = streams, len(values)
        index, weight = s.index[step, :a], s.weight[step, :a]
        found: tuple[Tensor, Tensor] = self._passes.slopes(values, *self._shape, s.x, s.y, index, weight)
        return found

    def evaluate(self, values: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """On examples x (n, D), y (n, ...), the same for all: sums of losses and of right classes, (G,)."""
        found: tuple[Tensor, Tensor] = self._passes.evaluate(values, *self._shape, x, y)
        return found
