"""Carrying nothing out: results of the right shapes, so that a plan shows its times without any training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from edgefl.learning import tasks
from edgefl.learning.executors import Inline
from edgefl.learning.work import (
    Evaluate,
    Evaluation,
    Gradient,
    GradientResult,
    LocalSGD,
    StageBackward,
    StageForward,
    StageGradient,
    Trained,
    Work,
)
from edgefl.parameters import Vector


class Unlearned(Inline):
    """An Executor that trains nothing: parameters come back unchanged, gradients are zeros, each loss is 1.

    Work of other kinds is carried out: programs may decide on what it returns.
    """

    def run(self, works: Sequence[Work]) -> list[object]:
        return [self._result(work) for work in works]

    def describe(self) -> dict[str, Any]:
        return {"executor": "none"}

    def _result(self, work: Work) -> object:
        if isinstance(work, LocalSGD):
            zeros = self.learner.optimizer.zeros((), (work.model or self.learner.model).layout)
            return Trained(work.parameters, 1.0, len(work.steps), work.state or zeros or None)
        if isinstance(work, Gradient):
            return GradientResult(_zeros(work.parameters), 1.0)
        if isinstance(work, Evaluate):
            # As one who guesses: neither an error of nothing nor all labels right.
            found = tasks.metrics(self.learner.model.task, 1.0, 0, max(work.batch.y.numel(), 1))
            return Evaluation(1.0, len(work.batch), found)
        if isinstance(work, StageForward):
            return torch.zeros((len(work.x), *work.stage.block_counts[-1].output_shape))
        if isinstance(work, StageBackward):
            wants = work.input_gradient and work.x.is_floating_point()
            loss = None if work.labels is None else 1.0
            return StageGradient(_zeros(work.parameters), torch.zeros_like(work.x) if wants else None, loss)
        try:
            return work.run(self.learner)
        except Exception as error:  # as executors do: it is raised where the program awaits it
            return error


def _zeros(parameters: Vector) -> Vector:
    """A gradient of nothing: the parameters stay, and so do their buffers."""
    kept = [torch.zeros_like(b) if b.is_floating_point() else b for b in parameters.buffers]
    return Vector(parameters.layout, torch.zeros_like(parameters.values), tuple(kept))
