"""What the tests of split methods share: plans with any shipped model, SGD to compare with, bytes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from methods_reference import run
from small import small_plan

from edgefl.data import LocalData
from edgefl.learning import Learner
from edgefl.learning.work import Gradient
from edgefl.learning.workload import TrainConfig, Workload
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector

sys.path.insert(0, str(Path(__file__).parent.parent / "learning"))
from learning_toys import ALL_MODELS, named_model

MODELS = [name for name in ALL_MODELS if name != "linear"]
CUTS = [(name, cut) for name in MODELS for cut in range(1, len(named_model(name)[0].blocks))]


def model_plan(
    method: str, name: str, num_clients: int = 1, *, rounds: int = 2, train: Any = None, **config: Any
) -> RunPlan:
    """A plan whose model is one of the shipped ones, with made data that fits it: 12 examples a client."""
    plan = small_plan(method, num_clients, rounds=rounds, **config)
    model, data = named_model(name)
    settings = {"learning_rate": 0.1, "batch_size": 4, "local_steps": 3} | (train or {})
    training = TrainConfig(**settings)
    nodes = []
    for i, spec in enumerate(plan.nodes):
        shares = np.arange(12 * (i - 1), 12 * i) % 40
        own = None if spec.data is None else LocalData(data, shares, i, seed=3)
        nodes.append(dataclasses.replace(spec, data=own, workload=Workload.of(training)))
    return dataclasses.replace(
        plan, nodes=tuple(nodes), learner=Learner(model, training, total_rounds=rounds)
    )


def trained(plan: RunPlan, stream: list[tuple[int, int]]) -> Vector:
    """[train]'s optimiser on the whole model over (node, step) batches; the round is step // local steps."""
    assert plan.learner is not None
    w, state = plan.learner.model.init(), None
    for node, step in stream:
        spec = plan.nodes[node]
        assert spec.data is not None
        g = Gradient(w, spec.data, step, spec.workload).run(plan.learner).gradient
        w, state = plan.learner.optimizer.step(w, g, state, step // spec.workload.num_steps(len(spec.data)))
    return w


def near(a: Vector, b: Vector, tolerance: float = 1e-5) -> bool:
    """Equal within `tolerance`, buffers included."""
    pairs = [(a.values, b.values), *zip(a.buffers, b.buffers, strict=True)]
    return all(torch.allclose(x.double(), y.double(), rtol=0, atol=tolerance) for x, y in pairs)


def payload(table: Any, *kinds: str, node: int | None = None) -> int:
    """Payload bytes of these kinds of messages, to or from a node where one is named."""
    return sum(row[1] for (i, j, kind), row in table.items() if kind in kinds and node in (None, i, j))


__all__ = ["CUTS", "MODELS", "model_plan", "near", "payload", "run", "trained"]
