"""The fleet on which ADSP is tried: eight clients, one half and one a quarter as fast."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from effects import step_s
from methods_reference import INSTANT
from small import digits, make_executor, small_plan
from toy import PROFILE, Watcher

from edgefl.data import Batch
from edgefl.data.config import PartitionConfig
from edgefl.data.partition import partition
from edgefl.nodes.plan import RunPlan
from edgefl.runtimes.outcome import Outcome
from edgefl.runtimes.virtual import VirtualRuntime

SPEEDS = (1, 1, 1, 1, 1, 1, 2, 4)
PERIOD = 30
"""Gamma, in fast steps."""


def boards(speeds: tuple[float, ...]) -> list[Any]:
    """A server to which evaluations are nothing, and clients whose steps take so many times longer."""
    return [
        PROFILE.model_copy(update={"name": f"toy-{s}", "compute_flops": 1e9 / s}) for s in (1e-3, *speeds)
    ]


def lab(
    method: str, *, commit: float = 0.0, seed: int = 1, speeds: tuple[float, ...] = SPEEDS, **more: Any
) -> tuple[RunPlan, float]:
    """A plan, and the seconds of a fast step. commit: steps that a commit takes.

    All mini-batches are whole, so that every step of a client takes the same time.
    """
    parts = partition(digits(), len(speeds), PartitionConfig(name="iid"), seed)
    even = min(map(len, parts)) // 16 * 16
    parts = [type(p)(p.dataset, p.indices[:even], p.node, p.seed) for p in parts]
    settings: dict[str, Any] = {"rounds": None, "train": {"local_steps": 1}} | more
    plan = small_plan(method, len(speeds), seed=seed, parts=parts, profiles=boards(speeds), **settings)
    unit = step_s(plan, 1) / speeds[0]
    wire = INSTANT.model_copy(update={"latency_s": commit * unit / 4})  # a commit crosses two ends twice
    access = (wire,) * len(plan.nodes)
    network = dataclasses.replace(plan.network, access=access)
    config = plan.config
    if method == "adsp" and config.check_period_s is None:
        config = config.model_copy(update={"check_period_s": PERIOD * unit})
    return dataclasses.replace(plan, network=network, config=config), unit


class Losses(Watcher):
    """Looks at the test loss of each published model; stops when all targets have been reached.

    times: seconds at which each target was first met.
    """

    def __init__(self, plan: RunPlan, *targets: float) -> None:
        super().__init__()
        assert plan.learner is not None
        self._learner, self._targets = plan.learner, targets
        dataset = digits()
        self._test = Batch(dataset.x_test, dataset.y_test)
        self.times: dict[float, float] = {}

    def published(self, node: int, time_s: float, step: int, parameters: Any, part: str | None) -> bool:
        super().published(node, time_s, step, parameters, part)
        if not self._targets:
            return False
        loss = self._learner.measure(parameters, self._test).loss
        for target in self._targets:
            if loss <= target:
                self.times.setdefault(target, time_s)
        return len(self.times) == len(self._targets)


def run_lab(plan: RunPlan, *targets: float, most_s: float | None = None) -> tuple[Outcome, Losses]:
    """Run until the targets are met, or for so many seconds."""
    torch.set_num_threads(1)
    watcher = Losses(plan, *targets)
    if most_s is not None:
        plan = dataclasses.replace(plan, time_s=most_s)
    assert plan.learner is not None
    outcome = VirtualRuntime(plan, watcher, make_executor("auto", plan.learner)).run()
    return outcome, watcher


def steps_to(method: str, *targets: float, **more: Any) -> dict[float, float]:
    """Fast steps until each test loss is reached."""
    plan, unit = lab(method, **more)
    _, watcher = run_lab(plan, *targets, most_s=3000 * unit)
    return {target: watcher.times.get(target, float("inf")) / unit for target in targets}
