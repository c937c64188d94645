"""A coreset: few of a node's examples, weighted so that they stand for all of them.

Examples of one class whose gradients at the last layer are alike stand for one another: in each class the
k-medoids of these gradients are kept, each with the number of examples that it is nearest to for its weight.
Source: FedCore (Guo et al. 2024, https://arxiv.org/abs/2402.00219).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edgefl.data import LocalData, WeightedData
from edgefl.learning import medoids
from edgefl.learning.cost import Cost
from edgefl.learning.learner import Learner
from edgefl.learning.model import Model
from edgefl.learning.models.dense import Dense
from edgefl.learning.work import Work
from edgefl.learning.work_costs import forward_cost
from edgefl.parameters import Vector

_BUILD_BYTES, _SWAP_BYTES, _SWAPS = 24, 100, 10
"""Bytes moved per pair of examples: for each medoid of the greedy start, and in a pass over all exchanges; of
these passes 1 to 27 were made on normal points (100 to 700 of them, 5 to 80 percent kept)."""


@dataclass(frozen=True)
class LastLayer:
    """Gradients of each example's own loss at the last layer, as factors. C classes, H inputs of the layer.

    outputs: (m, C) float64 at the layer's outputs, softmax less one-hot, which is the gradient at its bias;
    None where the inputs alone tell examples apart. inputs: (m, H) float64. The gradient at the weights is
    their outer product.
    """

    outputs: Tensor | None
    inputs: Tensor

    def vectors(self) -> Tensor:
        """(m, C (1 + H)) the gradients written out: bias, then weights row by row; or (m, H) the inputs."""
        if self.outputs is None:
            return self.inputs
        weights = self.outputs.unsqueeze(2) * self.inputs.unsqueeze(1)
        return torch.cat([self.outputs, weights.flatten(1)], 1)

    def distances(self, rows: np.ndarray) -> np.ndarray:
        """(n, n) Euclidean distances between the vectors of these rows, 0 between equal ones.

        Inner products of outer products are products of inner products, so no vector is written out.
        """
        inputs = self.inputs[torch.from_numpy(rows)]
        products = inputs @ inputs.T
        if self.outputs is not None:
            outputs = self.outputs[torch.from_numpy(rows)]
            products = (outputs @ outputs.T) * (1.0 + products)
        squares = products.diagonal()
        sums = squares[:, None] + squares
        apart = sums - 2.0 * products
        apart[apart < 1e-12 * sums] = 0.0  # the rounding of what is equal
        found: np.ndarray = apart.fill_diagonal_(0.0).sqrt_().numpy()
        return found


@torch.no_grad()
def last_layer(learner: Learner, parameters: Vector, data: LocalData) -> LastLayer:
    """The gradients of all examples of a node at these parameters, in the order of its indices.

    Of a model that is one layer the inputs stand for them. Buffers are used, not changed.
    """
    scratch = learner.scratch(learner.model)
    scratch.load(parameters)
    *body, end = scratch.module
    assert isinstance(end, Dense)
    scratch.module.eval()
    outputs, inputs = [], []
    for rows in np.array_split(data.indices, -(-len(data) // learner.evaluated_at_once)):
        batch = data.take(rows)
        x = scratch.inputs(batch.x)
        for block in body:
            x = block(x)
        p = end(x).double().softmax(-1)
        outputs.append((p - functional.one_hot(batch.y.to(p.device), p.shape[-1])).cpu())
        inputs.append(end.features(x).double().cpu())
    return LastLayer(torch.cat(outputs) if body else None, torch.cat(inputs))


def class_quotas(labels: np.ndarray, size: int) -> dict[int, int]:
    """How many of each class a coreset of about `size` > 0 holds: ceil(size m_y / m), at most m_y.

    >>> class_quotas(np.array([0, 0, 0, 2]), 2)
    {0: 2, 2: 1}
    """
    classes, counts = np.unique(labels, return_counts=True)
    of_class = zip(classes.tolist(), counts.tolist(), strict=True)
    return {y: min(n, -(-size * n // len(labels))) for y, n in of_class}


def last_width(model: Model) -> int:
    """Inputs of the last layer."""
    size = model.stage(len(model.blocks) - 1, len(model.blocks)).layout.size
    return size // model.num_outputs - 1


def has_last_layer(model: Model) -> bool:
    """Whether a model classifies and ends in a dense layer, as last_layer needs it."""
    end = model.factories[-1][1]()
    return model.task == "classification" and isinstance(end, Dense) and not end.relu


@dataclass(frozen=True, eq=False)
class Coreset:
    """indices: (b,) int64 ascending, into the data set; weights: (b,) float64, what each stands for."""

    indices: np.ndarray
    weights: np.ndarray

    def of(self, data: LocalData) -> WeightedData:
        """As a node's data to train on."""
        return WeightedData(data.dataset, self.indices, data.node, data.seed, weights=self.weights)


@dataclass(frozen=True, eq=False)
class SelectCoreset(Work):
    """Choose about `size` > 0 of a node's examples to stand for all of them. Returns Coreset.

    by: "gradients" at the last layer, at `parameters`; or "inputs". Each class keeps its class_quotas; its
    weights sum to its examples. seconds_per_pair: what each pair of examples of one class costs in seconds
    on any device; where None, operations and bytes are counted.
    """

    parameters: Vector
    data: LocalData
    size: int
    by: Literal["gradients", "inputs"] = "gradients"
    seconds_per_pair: float | None = None

    @cached_property
    def _labels(self) -> np.ndarray:
        found: np.ndarray = self.data.dataset.y_train.numpy()[self.data.indices]
        return found

    def _classes(self) -> Iterator[tuple[np.ndarray, int]]:
        """The rows of each class that is kept some of, and how many."""
        for y, quota in class_quotas(self._labels, self.size).items():
            yield np.flatnonzero(self._labels == y), quota

    def cost(self, learner: Learner) -> Cost:
        classes = [(len(rows), quota) for rows, quota in self._classes()]
        pairs = sum(n * n for n, _ in classes)
        if self.seconds_per_pair is not None:
            return Cost(seconds=self.seconds_per_pair * pairs)
        model = learner.model
        whole = forward_cost(model, len(self.data), learner.evaluated_at_once)
        # The products of a pair: over the last layer's outputs and inputs, its bias aside.
        per_pair = 2 * (model.num_outputs + last_width(model))
        built = sum(n * n * quota for n, quota in classes)
        return replace(
            whole,
            flops=whole.flops + pairs * per_pair + 2 * _SWAPS * built,
            traffic_bytes=whole.traffic_bytes + _BUILD_BYTES * built + _SWAPS * _SWAP_BYTES * pairs,
            memory_bytes=whole.memory_bytes + 5 * 8 * max((n * n for n, _ in classes), default=0),
            calls=None,
        )

    def run(self, learner: Learner) -> Coreset:
        if self.by == "inputs":
            x = self.data.take(self.data.indices).x
            found = LastLayer(None, x.flatten(1).double())
        else:
            found = last_layer(learner, self.parameters, self.data)
        chosen, weights = [], []
        for rows, quota in self._classes():
            distances = found.distances(rows)
            kept = medoids.k_medoids(distances, quota)
            chosen.append(rows[kept])
            weights.append(medoids.counts(distances, kept))
        return _coreset(self.data, chosen, weights)


def random_coreset(data: LocalData, size: int, rng: np.random.Generator) -> Coreset:
    """As many of each class as SelectCoreset keeps, drawn at random, of equal weights m_y / b_y."""
    labels = data.dataset.y_train.numpy()[data.indices]
    chosen, weights = [], []
    for y, quota in class_quotas(labels, size).items():
        rows = np.flatnonzero(labels == y)
        chosen.append(rng.choice(rows, quota, replace=False))
        weights.append(np.full(quota, len(rows) / quota))
    return _coreset(data, chosen, weights)


def _coreset(data: LocalData, rows: list[np.ndarray], weights: list[np.ndarray]) -> Coreset:
    """These rows of a node's examples, class by class, with their weights."""
    places, values = data.indices[np.concatenate(rows)], np.concatenate(weights).astype(np.float64)
    order = places.argsort()
    return Coreset(places[order], values[order])
