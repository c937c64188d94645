"""The plain alternatives: what somebody writes with PyTorch alone, one model after the other."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from edgefl.data import LocalData


def loss_of(model: nn.Module, data: LocalData, step: int, batch_size: int) -> torch.Tensor:
    """The loss on a node's mini-batch."""
    batch = data.batch(step, batch_size)
    return functional.cross_entropy(model(batch.x), batch.y)


def train(model: nn.Module, data: LocalData, steps: range, batch_size: int, rate: float) -> None:
    """Plain SGD in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, data, step, batch_size).backward()
        optimizer.step()


def mean_state(
    states: Sequence[dict[str, torch.Tensor]], weights: Sequence[float]
) -> dict[str, torch.Tensor]:
    """The weighted mean of state dictionaries."""
    total = sum(weights)
    return {
        name: sum(state[name] * (weight / total) for state, weight in zip(states, weights, strict=True))
        for name in states[0]
    }


def fedavg(
    model: nn.Module,
    parts: Sequence[LocalData],
    cohort: int,
    rounds: int,
    steps: int,
    batch: int,
    rate: float,
) -> float:
    """FedAvg, client after client. Returns client updates per second."""
    rng = np.random.default_rng(0)
    local = copy.deepcopy(model)
    start = time.perf_counter()
    for t in range(rounds):
        chosen = rng.choice(len(parts), cohort, replace=False)
        states, weights = [], []
        for i in chosen:
            local.load_state_dict(model.state_dict())
            train(local, parts[i], range(t * steps, (t + 1) * steps), batch, rate)
            states.append({name: value.clone() for name, value in local.state_dict().items()})
            weights.append(float(len(parts[i])))
        model.load_state_dict(mean_state(states, weights))
    return rounds * cohort / (time.perf_counter() - start)


def d_psgd(
    model: nn.Module,
    parts: Sequence[LocalData],
    neighbors: Sequence[Sequence[int]],
    rounds: int,
    steps: int,
    batch: int,
    rate: float,
) -> float:
    """D-PSGD with uniform weights, node after node: mix, then add what `steps` of SGD at the own model
    change. Returns node rounds per second."""
    models = [copy.deepcopy(model) for _ in parts]
    start = time.perf_counter()
    for k in range(rounds):
        states = [{name: value.clone() for name, value in m.state_dict().items()} for m in models]
        for i, (m, data) in enumerate(zip(models, parts, strict=True)):
            train(m, data, range(k * steps, (k + 1) * steps), batch, rate)
            near = [states[i], *(states[j] for j in neighbors[i])]
            mixed = mean_state(near, [1.0] * len(near))
            after = m.state_dict()
            m.load_state_dict({name: mixed[name] + after[name] - states[i][name] for name in mixed})
    return rounds * len(parts) / (time.perf_counter() - start)
