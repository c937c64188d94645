"""Accuracy over time, for the experiments in which methods are compared."""

from __future__ import annotations

from typing import Any

import torch
from small import make_executor
from toy import Watcher

from edgefl.data import Batch
from edgefl.learning.cost import duration_s
from edgefl.learning.work import Gradient
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector, WeightedMean
from edgefl.runtimes.virtual import VirtualRuntime


class Accuracy(Watcher):
    """Looks at the models every so often; stops when all of the targets have been reached.

    of: "mean" (accuracy of the mean model) or "each" (mean over nodes of the accuracy of each one's own).
    times: seconds at which each target was first seen to be met.
    """

    def __init__(self, plan: RunPlan, every_s: float, targets: tuple[float, ...], of: str = "mean") -> None:
        super().__init__(every_s)
        assert plan.learner is not None
        self._learner, self._targets, self._of = plan.learner, targets, of
        data = next(spec.data for spec in plan.nodes if spec.data is not None)
        self._test = Batch(data.dataset.x_test, data.dataset.y_test)
        start = plan.learner.model.init()
        self.now: dict[int, Vector] = {i: start for i, spec in enumerate(plan.nodes) if spec.data is not None}
        self.times: dict[float, float] = {}
        self.accuracy = 0.0
        self.num_steps = 0

    def published(self, node: int, time_s: float, step: int, parameters: Any, part: str | None) -> bool:
        self.now[node] = parameters
        return False

    def recorded(self, node: int, time_s: float, metrics: Any) -> None:
        self.num_steps += "train_loss" in metrics

    def span(self, *span: Any) -> None:
        pass

    def look(self) -> None:
        """Measure the models as they are now."""
        self.accuracy = self._accuracy()

    def tick(self, time_s: float) -> bool:
        self.look()
        for target in self._targets:
            if self.accuracy >= target:
                self.times.setdefault(target, time_s)
        return bool(self._targets) and len(self.times) == len(self._targets)

    def _accuracy(self) -> float:
        models = list(self.now.values())
        if self._of == "mean":
            mean = WeightedMean(models[0].layout)
            for model in models:
                mean.add(model)
            models = [mean.value(otherwise=models[0])]
        return sum(self._measure(model) for model in models) / len(models)

    def _measure(self, model: Vector) -> float:
        found = self._learner.measure(model, self._test)
        return found.correct / found.num_targets


def times_to(plan: RunPlan, every_s: float, *targets: float, of: str = "mean") -> Accuracy:
    """Run a plan until the targets are reached, or to its end; its accuracy is then that of the end."""
    torch.set_num_threads(1)
    assert plan.learner is not None
    watcher = Accuracy(plan, every_s, targets, of)
    VirtualRuntime(plan, watcher, make_executor("auto", plan.learner)).run()
    watcher.look()
    return watcher


def step_s(plan: RunPlan, node: int) -> float:
    """Seconds that one mini-batch gradient takes a node, its slowdown aside."""
    spec = plan.nodes[node]
    assert plan.learner is not None and spec.data is not None
    work = Gradient(plan.learner.model.init(), spec.data, 0, spec.workload)
    return duration_s(work.cost(plan.learner), spec.profile)
