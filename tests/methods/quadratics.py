"""Clients whose losses are quadratics with optima far apart: linear regression on their whole shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from small import small_plan
from torch import Tensor

from edgefl.data import Dataset, LocalData
from edgefl.nodes.plan import RunPlan

FEATURES = 3


def quadratic_plan(
    method: str,
    sizes: Sequence[int],
    *,
    rounds: int,
    rate: float,
    train: dict[str, Any],
    seed: int = 0,
    features: int = FEATURES,
    **more: Any,
) -> RunPlan:
    """A plan in which client k minimises the mean squared error of its own sizes[k] examples.

    The clients' true models and input scales differ, so that their quadratics do. Every mini-batch is a
    client's whole share.
    """
    rng = np.random.default_rng(seed)
    x, y = [], []
    for k, n in enumerate(sizes):
        inputs = rng.normal(size=(n, features)) * (0.5 + 0.5 * k / len(sizes))
        x.append(inputs)
        y.append(inputs @ rng.normal(size=features) * 2 + rng.normal())
    inputs = torch.tensor(np.concatenate(x), dtype=torch.float32)
    targets = torch.tensor(np.concatenate(y), dtype=torch.float32)[:, None]
    dataset = Dataset("quadratics", "regression", inputs, targets, inputs, targets, 0)
    ends = np.cumsum([0, *sizes])
    parts = [LocalData(dataset, np.arange(ends[k], ends[k + 1]), k, 0) for k in range(len(sizes))]
    return small_plan(
        method,
        len(sizes),
        rounds=rounds,
        model={"name": "linear"},
        dataset=dataset,
        parts=parts,
        train={"learning_rate": rate, "batch_size": max(sizes), **train},
        **more,
    )


def normal_equations(plan: RunPlan, k: int) -> tuple[Tensor, Tensor]:
    """(H, b) with gradient H w - b of client k's loss at w = (weights, bias), float64."""
    spec = [spec for spec in plan.nodes if spec.data is not None][k]
    batch = spec.data.take(spec.data.indices)
    design = torch.cat([batch.x, torch.ones(len(batch), 1)], 1).double()
    return 2 * design.T @ design / len(batch), 2 * design.T @ batch.y.double()[:, 0] / len(batch)


def optimum(plan: RunPlan, weights: Sequence[float]) -> Tensor:
    """(4,) where the weighted sum of the clients' losses is least."""
    parts = [normal_equations(plan, k) for k in range(len(weights))]
    H = sum(w * h for w, (h, _) in zip(weights, parts, strict=True))
    b = sum(w * b for w, (_, b) in zip(weights, parts, strict=True))
    return torch.linalg.solve(H, b)


def distance(w: Any, target: Tensor) -> float:
    """Between a model's values and a point."""
    return float((w.values.double() - target).norm())
