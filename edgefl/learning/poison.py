"""Hostile nodes: what they make of the results of their work.

A poisoned node runs the method's own program; what its processor returns is not what it should be. So
every method meets the same attackers, in every runtime.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from edgefl.data import Dataset, LocalData
from edgefl.keyed import generator
from edgefl.learning.cost import Cost
from edgefl.learning.work import Gradient, GradientResult, LocalSGD, Trained, Work
from edgefl.parameters import Vector

if TYPE_CHECKING:
    from edgefl.learning.learner import Learner

PoisonKind = Literal["sign-flip", "noise", "nan"]


@dataclass(frozen=True)
class Poison:
    """What a hostile node does.

    sign-flip: its change is `scale` times what it should be, in the other direction. noise: its change is
    normal noise of standard deviation `scale`. nan: its change is not a number.
    """

    kind: PoisonKind
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Poisoned(Work):
    """Somebody's work, carried out by a hostile node; what does not train is left alone."""

    work: Work
    poison: Poison
    node: int

    def cost(self, learner: Learner) -> Cost:
        return self.work.cost(learner)

    def run(self, learner: Learner) -> Any:
        result = self.work.run(learner)
        if isinstance(self.work, LocalSGD) and isinstance(result, Trained):
            start = self.work.parameters
            change = self._spoilt(result.parameters - start, self.work.data.seed, self.work.steps.start)
            return dataclasses.replace(result, parameters=start + change)
        if isinstance(self.work, Gradient) and isinstance(result, GradientResult):
            gradient = self._spoilt(result.gradient, self.work.data.seed, self.work.step)
            return dataclasses.replace(result, gradient=gradient)
        return result

    def _spoilt(self, change: Vector, seed: int, step: int) -> Vector:
        if self.poison.kind == "sign-flip":
            return change.with_values(change.values * -self.poison.scale)
        if self.poison.kind == "nan":
            return change.with_values(torch.full_like(change.values, torch.nan))
        rng = generator(seed, "poison", self.node, step)
        noise = torch.from_numpy(rng.standard_normal(change.layout.size)) * self.poison.scale
        return change.with_values(noise.to(change.values.dtype))


def with_flipped_labels(dataset: Dataset) -> Dataset:
    """The same examples, training label c of C turned into C - 1 - c. Raises ValueError without labels."""
    if dataset.task != "classification":
        raise ValueError(f"{dataset.name} has no labels to flip")
    return dataclasses.replace(dataset, y_train=dataset.num_classes - 1 - dataset.y_train)


def poisoned_data(part: LocalData, flipped: Dataset) -> LocalData:
    """A node's share of the data set with flipped labels."""
    return LocalData(flipped, part.indices, part.node, part.seed)
