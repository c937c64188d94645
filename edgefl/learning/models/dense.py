"""Dense models: a linear one, and multilayer perceptrons."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from edgefl.learning.models.base import Blocks, Options, Problem
from edgefl.learning.narrowing import Flow, Part


class Dense(nn.Linear):
    """One dense layer as a block: (B, ...) flattened to (B, in_features), to (B, out_features)."""

    def __init__(self, in_features: int, out_features: int, relu: bool) -> None:
        super().__init__(in_features, out_features)
        self.relu = relu

    def features(self, x: Tensor) -> Tensor:
        """(B, in_features): what the matrix is multiplied with."""
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.features(x))
        return functional.relu(y) if self.relu else y

    def part(self, name: str, before: Flow, last: bool) -> Part:
        own = None if last else name
        tensors = {"weight": (own, before.group), "bias": (own,)}
        return Part(before, Flow(self.out_features, own), tensors)

    def narrowed(self, part: Part, size: Callable[[Flow], int]) -> Callable[[], nn.Module]:
        per_unit = self.in_features // part.before.units
        return partial(type(self), size(part.before) * per_unit, size(part.after), self.relu)


class LinearOptions(Options):
    """One dense layer: softmax or linear regression."""

    def blocks(self, problem: Problem) -> Blocks:
        return (("output", partial(Dense, problem.num_inputs, problem.num_outputs, False)),)


class MLPOptions(Options):
    """Dense layers with ReLU between them."""

    hidden: tuple[int, ...] = Field(default=(64,), min_length=1)
    """Units of each hidden layer."""

    def blocks(self, problem: Problem) -> Blocks:
        sizes = (problem.num_inputs, *self.hidden)
        hidden = tuple(
            (f"hidden{i}", partial(Dense, sizes[i - 1], sizes[i], True)) for i in range(1, len(sizes))
        )
        return (*hidden, ("output", partial(Dense, sizes[-1], problem.num_outputs, False)))
