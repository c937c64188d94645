"""What the tests of split methods share: plans with any shipped model, SGD to compare with, bytes."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from itertools import pairwise
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
from edgefl.parameters import Vector, WeightedMean
from edgefl.planning.edgesplit import CutPlan
from edgefl.planning.hsfl import HSFLPlan, Shares

sys.path.insert(0, str(Path(__file__).parent.parent / "learning"))
from learning_toys import ALL_MODELS, named_model

MODELS = [name for name in ALL_MODELS if name != "linear"]
BLOCKS = {name: len(named_model(name)[0].blocks) for name in MODELS}
CUTS = [(name, cut) for name in MODELS for cut in range(1, BLOCKS[name])]
OPTIMISERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3, "schedule": "cosine"},
    "adam": {"optimizer": "adam", "learning_rate": 0.01},
}
FRESH: dict[str, frozenset[int]] = {
    "split-learning": frozenset(),
    "split-learning-u": frozenset(),
    "splitfed-v1": frozenset({0, 1}),
    "splitfed-v2": frozenset({0}),
    "parallel-split": frozenset({0}),
}
"""Methods that are unsplit training with one client: the parts (0: the front) whose optimisers begin anew in
each round."""
OWN_CUTS = ("edgesplit", "hsfl", "hsfl-layerwise")
"""Methods in which each client has a cut of its own."""


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


def cuts_of(method: str, name: str) -> list[dict[str, Any]]:
    """The settings of a method with one cut, or one pair of them, for each cut of a shipped model."""
    blocks = BLOCKS[name]
    if method == "split-learning-u":
        return [{"cut": c, "head_blocks": h} for c in range(1, blocks - 1) for h in range(1, blocks - c)]
    return [{"cut": c} for c in range(1, blocks)]


def one_client_cases() -> list[tuple[str, str]]:
    """(method, model): those of FRESH with each shipped model that they can cut."""
    return [(method, name) for method in FRESH for name in MODELS if cuts_of(method, name)]


def trained(plan: RunPlan, stream: list[tuple[int, int]], start: Vector | None = None) -> Vector:
    """[train]'s optimiser on the whole model over (node, step) batches; the round is step // local steps."""
    assert plan.learner is not None
    return trained_in_parts(plan, stream, (), frozenset(), start)


def trained_in_parts(
    plan: RunPlan,
    stream: list[tuple[int, int]],
    cuts: tuple[int, ...],
    fresh: frozenset[int],
    start: Vector | None = None,
) -> Vector:
    """As `trained`, with an optimiser for each part between the cuts; the gradient is the whole model's.

    fresh: parts whose optimiser begins anew at each round.
    """
    assert plan.learner is not None
    model, optimizer = plan.learner.model, plan.learner.optimizer
    ends = (0, *cuts, len(model.blocks))
    w, last = start or model.init(), None
    states: list[Any] = [None] * (len(ends) - 1)
    for node, step in stream:
        spec = plan.nodes[node]
        assert spec.data is not None
        t = step // spec.workload.num_steps(len(spec.data))
        g = Gradient(w, spec.data, step, spec.workload).run(plan.learner).gradient
        parts = []
        for i, (a, b) in enumerate(pairwise(ends)):
            state = None if i in fresh and t != last else states[i]
            part, states[i] = optimizer.step(model.cut(w, a, b), model.cut(g, a, b), state, t)
            parts.append(part)
        w, last = model.join(*parts), t
    return w


def unsplit_by_one_client(plan: RunPlan) -> Vector:
    """What a method with one client must come to: unsplit training with the optimisers of the method."""
    config, model = plan.config, plan.learner.model
    cuts = (config.cut,)
    if plan.method.name == "split-learning-u":
        cuts = (config.cut, len(model.blocks) - config.head_blocks)
    stream = [(1, step) for step in range(3 * plan.rounds)]
    return trained_in_parts(plan, stream, cuts, FRESH[plan.method.name])


def each_its_cut(plan: RunPlan, cuts: list[int], *, personal: bool) -> tuple[Vector, dict[int, Vector]]:
    """Rounds in which every client trains a whole model with a fresh optimiser, client k cut at cuts[k - 1].

    personal: fronts stay with their clients, and a layer is averaged over those that have it behind their
    cut; otherwise every layer over all. Returns the last W and the fronts by client.
    """
    model, last = plan.learner.model, len(plan.learner.model.blocks)
    w = model.init()
    fronts = {k: model.cut(w, 0, cut) for k, cut in enumerate(cuts, start=1)}
    for t in range(plan.rounds):
        ends = {}
        for k, cut in enumerate(cuts, start=1):
            whole = w
            if personal:
                whole = model.join(fronts[k], model.cut(w, cut, last)) if cut < last else fronts[k]
            ends[k] = trained(plan, [(k, step) for step in range(3 * t, 3 * t + 3)], whole)
            fronts[k] = model.cut(ends[k], 0, cut)
        blocks = []
        for l in range(last):
            kept = model.cut(w, l, l + 1)
            mean = WeightedMean(kept.layout)
            for k, cut in enumerate(cuts, start=1):
                if not personal or cut <= l:
                    mean.add(model.cut(ends[k], l, l + 1), len(plan.nodes[k].data))
            blocks.append(mean.value(otherwise=kept))
        w = model.join(*blocks)
    return w, fronts


def with_cuts(method: str, cuts: list[int], monkeypatch: Any) -> None:
    """Let a method's planner find these cuts, with a tenth of the link for each client."""
    shares = (0.1,) * len(cuts)
    if method == "edgesplit":
        found: Any = CutPlan(tuple(cuts), tuple(1e6 * share for share in shares), shares)
    else:
        found = HSFLPlan(tuple(cuts), Shares(0.1, shares, shares), 0.1)
    module = importlib.import_module(f"edgefl.methods.split.{method.replace('-', '_')}")
    planner = "edgesplit_plan" if method == "edgesplit" else "hsfl_plan"
    monkeypatch.setattr(module, planner, lambda *_, **__: found)


def near(a: Vector, b: Vector, tolerance: float = 1e-5) -> bool:
    """Equal within `tolerance`, buffers included."""
    pairs = [(a.values, b.values), *zip(a.buffers, b.buffers, strict=True)]
    return all(torch.allclose(x.double(), y.double(), rtol=0, atol=tolerance) for x, y in pairs)


def without_keys(w: Vector) -> Vector:
    """The model with the biases of its attention keys at 0.

    They move all scores of a query alike, so their gradient is 0 but for rounding. Adam divides it by its own
    size: where sums are in another order, as over micro-batches, they go elsewhere, and nothing else does.
    """
    values = w.values.clone()
    for name, view in w.layout.views(values).items():
        if name.endswith("qkv.bias"):
            view[len(view) // 3 : 2 * len(view) // 3] = 0
    return w.with_values(values)


def payload(table: Any, *kinds: str, node: int | None = None) -> int:
    """Payload bytes of these kinds of messages, to or from a node where one is named."""
    return sum(row[1] for (i, j, kind), row in table.items() if kind in kinds and node in (None, i, j))


__all__ = [
    "BLOCKS", "CUTS", "MODELS", "OPTIMISERS", "OWN_CUTS", "cuts_of", "each_its_cut", "model_plan", "near",
    "one_client_cases", "payload", "run", "trained", "unsplit_by_one_client", "with_cuts",
    "without_keys",
]  # fmt: skip
