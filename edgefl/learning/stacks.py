"""Stacks of dense layers as rows of a matrix, and what passes through them side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.data import Task
from edgefl.learning.model import Model
from edgefl.learning.models.dense import Dense
from edgefl.learning.passes import compiled


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
    """G models of one shape, weights (G, U, D) and biases (G, U) of each layer. Suffixes as in `passes`."""

    def __init__(
        self, task: Task, layers: tuple[Layer, ...], weights: list[Tensor], biases: list[Tensor]
    ) -> None:
        self.task, self.layers = task, layers
        self.weights, self.biases = weights, biases
        self._relus, self._regression = [at.relu for at in layers], task == "regression"
        self._passes = compiled()

    @classmethod
    def of(cls, task: Task, layers: tuple[Layer, ...], values_GP: Tensor, *, own: bool = False) -> Stacks:
        """The models in the rows of a matrix: as views of it or, own, as copies that lie layer by layer."""
        weights = [values_GP[:, at.weight].view(-1, at.units, at.inputs) for at in layers]
        biases = [values_GP[:, at.bias] for at in layers]
        if own:
            weights, biases = [_copy(t) for t in weights], [_copy(t) for t in biases]
        return cls(task, layers, weights, biases)

    def first(self, count: int) -> Stacks:
        """The first so many models, as views."""
        if count == len(self.biases[0]):
            return self
        weights, biases = [t[:count] for t in self.weights], [t[:count] for t in self.biases]
        return Stacks(self.task, self.layers, weights, biases)

    def rows(self) -> Tensor:
        """(G, P) the models as the rows of a new matrix."""
        size = sum(at.units * (at.inputs + 1) for at in self.layers)
        values = self.biases[0].new_empty(len(self.biases[0]), size)
        for at, weight, bias in zip(self.layers, self.weights, self.biases, strict=True):
            values[:, at.weight] = weight.flatten(1)
            values[:, at.bias] = bias
        return values

    def outputs(self, x_GBD: Tensor) -> Tensor:
        """(G, K, B) what the last layer says."""
        outputs: list[Tensor] = self._passes.forward(self.weights, self.biases, self._relus, x_GBD)
        return outputs[-1]

    def losses(self, output_GKB: Tensor, y: Tensor) -> Tensor:
        """The loss of each example, (G, B). y: (G, B) classes, or (G, B, ...) values."""
        loss_GB: Tensor
        one_11 = output_GKB.new_ones((1, 1))
        loss_GB, _ = self._passes.output_slope(output_GKB, y, one_11, self._regression)
        return loss_GB

    def gradient(self, into: Stacks, x_GBD: Tensor, y: Tensor, weight_GB: Tensor) -> Tensor:
        """The gradient of each model's weighted loss into models of its shape; losses, (G, B)."""
        loss_GB: Tensor = self._passes.gradient(
            self.weights, self.biases, self._relus, self._regression,
            x_GBD, y, weight_GB, into.weights, into.biases,
        )  # fmt: skip
        return loss_GB

    def descend(self, x_SGBD: Tensor, y: Tensor, move_SGB: Tensor, active: list[int]) -> Tensor:
        """Steps of plain SGD in place, for `own` copies; returns the losses before each, (S, G, B)."""
        loss_SGB: Tensor = self._passes.descend(
            self.weights, self.biases, self._relus, self._regression, x_SGBD, y, move_SGB, active
        )
        return loss_SGB


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
