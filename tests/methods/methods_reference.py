"""What the methods are held against: stochastic gradient descent written out in plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from toy import Watcher

from edgefl.data import Batch
from edgefl.learning.executors import Inline
from edgefl.learning.work import Trained
from edgefl.network import Access
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.runtimes.outcome import Outcome
from edgefl.runtimes.virtual import VirtualRuntime

INSTANT = Access(up_bytes_per_s=1e15, down_bytes_per_s=1e15)
"""Links that take no time to speak of."""


def gradient(plan: RunPlan, x: Tensor, batch: Batch) -> Tensor:
    """(P,) the gradient of the mean cross-entropy of a batch at flat parameters x (P,)."""
    assert plan.learner is not None
    model = plan.learner.model
    module = model.build()
    with torch.no_grad():
        for (_, parameter), view in zip(
            module.named_parameters(), model.layout.views(x).values(), strict=True
        ):
            parameter.copy_(view)
    functional.cross_entropy(module(batch.x), batch.y).backward()
    return torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])


def batches(plan: RunPlan, node: int, steps: Iterable[int]) -> list[Batch]:
    """These steps of a node's stream of mini-batches."""
    spec = plan.nodes[node]
    assert spec.data is not None
    return [spec.data.batch(k, spec.workload.batch_size) for k in steps]


def union(parts: Iterable[Batch]) -> Batch:
    """One large batch."""
    parts = list(parts)
    return Batch(torch.cat([b.x for b in parts]), torch.cat([b.y for b in parts]))


def sgd(plan: RunPlan, stream: Iterable[Batch], x: Tensor | None = None) -> Tensor:
    """Plain SGD over these batches at [train]'s rate, from x or the model's start."""
    x = start(plan) if x is None else x
    for batch in stream:
        x = torch.add(x, gradient(plan, x, batch), alpha=-rate(plan))
    return x


def start(plan: RunPlan) -> Tensor:
    assert plan.learner is not None
    return plan.learner.model.init().values.clone()


def rate(plan: RunPlan) -> float:
    assert plan.learner is not None
    return plan.learner.train.learning_rate


def run(plan: RunPlan, watcher: Watcher | None = None, executor: Any = None) -> Outcome:
    """Run a plan item by item, so that nothing but the method shows."""
    assert plan.learner is not None
    return VirtualRuntime(plan, watcher or Watcher(), executor or Inline(plan.learner)).run()


class Recording(Inline):
    """Carries out item by item and keeps what came out, in order."""

    def __init__(self, learner: Any) -> None:
        super().__init__(learner)
        self.results: list[Any] = []

    def run(self, works: Any) -> list[object]:
        results = super().run(works)
        self.results += results
        return results

    @property
    def trained(self) -> list[Vector]:
        return [r.parameters for r in self.results if isinstance(r, Trained)]


class Wrapped:
    """Something that stands for another thing in all that it does not define itself."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ScatteredModel(Wrapped):
    """A model that starts at values drawn by node."""

    def __init__(self, inner: Any, node: int) -> None:
        super().__init__(inner)
        self.node = node

    def init(self) -> Vector:
        x: Vector = self.inner.init()
        return x.with_values(scatter(x.layout.size, self.node))


class Scattered(Wrapped):
    """A node that starts elsewhere than all others."""

    @property
    def model(self) -> ScatteredModel:
        return ScatteredModel(self.inner.model, self.inner.id)


def scatter(size: int, node: int) -> Tensor:
    """(size,) standard normal values, keyed by node."""
    return torch.randn(size, generator=torch.Generator().manual_seed(100 + node))


def with_programs(plan: RunPlan, **programs: Any) -> RunPlan:
    """The same plan with other programs for some roles."""
    roles = {**plan.method.roles, **programs}
    return dataclasses.replace(plan, method=dataclasses.replace(plan.method, roles=roles))
