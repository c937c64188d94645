"""Many stacks of dense layers, trained or evaluated side by side, without autograd.

Legend of shape suffixes: G models side by side, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgefl.data import Dataset, LocalData
from edgefl.learning import tasks
from edgefl.learning.learner import Learner, check_examples, check_steps, value_of
from edgefl.learning.model import Model
from edgefl.learning.stacks import Layer, Stacks
from edgefl.learning.streams import Streams
from edgefl.learning.work import Evaluate, Evaluation, Gradient, GradientResult, LocalSGD, Trained
from edgefl.parameters import Vector

Run = tuple[Tensor, Tensor, tuple[Tensor, ...]]
"""New models (G, P), sums over the steps of their losses (G,), and the optimiser's states."""


class DenseGroups:
    """Carries out groups of equal work items for a model of dense layers.

    Each result is that of Inline up to rounding, whoever else is in the group.
    """

    def __init__(
        self,
        learner: Learner,
        layers: tuple[Layer, ...],
        model: Model | None = None,
        beside: DenseGroups | None = None,
    ) -> None:
        """model: a narrower one, the learner's where None. beside: groups whose data is shared."""
        self.learner, self.model = learner, model or learner.model
        self._stacks = Stacks(self.model.task, layers)
        self._data: dict[Dataset, tuple[Tensor, Tensor]] = {} if beside is None else beside._data

    def train(self, works: Sequence[LocalSGD]) -> list[Trained]:
        """Local training of several nodes on one data set, side by side."""
        steps = [work.steps for work in works]
        for work, mine in zip(works, steps, strict=True):
            check_steps(mine, work.data)
        order = sorted(range(len(works)), key=lambda i: -len(steps[i]))
        found = self._train([works[i] for i in order], [steps[i] for i in order])
        results: dict[int, Trained] = dict(zip(order, found, strict=True))
        return [results[i] for i in range(len(works))]

    def _train(self, works: Sequence[LocalSGD], steps: Sequence[range]) -> list[Trained]:
        """The same, for items with more steps first: those with fewer drop out of the active rows."""
        nodes = [(work.data, mine) for work, mine in zip(works, steps, strict=True)]
        streams = self._streams(nodes, works[0].workload.batch_size)
        bent = works[0].proximal_mu or works[0].correction is not None
        plain = self.learner.optimizer.is_plain and not bent
        values, loss, state = (self._descend if plain else self._optimise)(works, streams)
        # The norms are wanted of every report that a server takes in; here they are taken beside other work.
        norms = torch.linalg.vector_norm(values, dim=1).tolist()
        sums, vectors = loss.tolist(), self._vectors(values, norms)
        return [
            Trained(vector, sums[i] / len(mine), len(mine), tuple(value_of(t[i]) for t in state) or None)
            for i, (mine, vector) in enumerate(zip(steps, vectors, strict=True))
        ]

    def _descend(self, works: Sequence[LocalSGD], streams: Streams) -> Run:
        """Steps of plain SGD."""
        values, loss = self._stacks.train(self._values(works), streams, self._rates(works))
        return values, loss, ()

    def _optimise(self, works: Sequence[LocalSGD], streams: Streams) -> Run:
        """Steps of any optimiser."""
        optimizer = self.learner.optimizer
        values, state = self._values(works).clone(memory_format=torch.contiguous_format), self._states(works)
        loss, rate_G1 = values.new_zeros(len(works)), self._rates(works).unsqueeze(1)
        anchor = self._rows([w.anchor or w.parameters for w in works]) if works[0].proximal_mu else None
        corrections = [w.correction for w in works if w.correction is not None]
        shift = self._rows(corrections) if corrections else None
        mu_G1 = values.new_tensor([[w.proximal_mu] for w in works])
        for step, a in enumerate(streams.active):
            here = values[:a]
            slope, losses = self._stacks.gradients(here, streams, step)
            loss[:a] += losses
            if anchor is not None:
                slope.addcmul_(here - anchor[:a], mu_G1[:a])
            if shift is not None:
                slope.add_(shift[:a])
            optimizer.clip_(slope)
            optimizer.step_(here, slope, tuple(t[:a] for t in state), rate_G1[:a])
        return values, loss, state

    def gradients(self, works: Sequence[Gradient]) -> list[GradientResult]:
        """One mini-batch gradient of several nodes on one data set."""
        nodes = [(w.data, range(w.step, w.step + 1)) for w in works]
        streams = self._streams(nodes, works[0].workload.batch_size)
        gradient, losses = self._stacks.gradients(self._values(works), streams)
        self.learner.optimizer.clip_(gradient)
        pairs = zip(self._vectors(gradient), losses.tolist(), strict=True)
        return [GradientResult(vector, loss) for vector, loss in pairs]

    def evaluate(self, works: Sequence[Evaluate]) -> list[Evaluation]:
        """Several models on one batch of examples."""
        batch, task, values = works[0].batch, self.model.task, self._values(works)
        check_examples(batch)
        size, n = self.learner.evaluated_at_once, len(batch)
        loss, right = values.new_zeros(len(works), dtype=torch.float64), values.new_zeros(len(works))
        x, y = batch.x.flatten(1).to(values.device), batch.y.to(values.device)
        for some_x, some_y in zip(torch.split(x, size), torch.split(y, size), strict=True):
            some_loss, some_right = self._stacks.evaluate(values, some_x, some_y)
            loss += some_loss
            right += some_right
        found = zip((loss / n).tolist(), right.tolist(), strict=True)
        return [Evaluation(mean, n, tasks.metrics(task, mean, k, n)) for mean, k in found]

    def _streams(self, nodes: Sequence[tuple[LocalData, range]], batch_size: int) -> Streams:
        dataset = nodes[0][0].dataset
        if dataset not in self._data:
            device = self.learner.device
            self._data[dataset] = dataset.x_train.flatten(1).to(device), dataset.y_train.to(device)
        return Streams(*self._data[dataset], nodes, batch_size)

    def _values(self, works: Sequence[LocalSGD | Gradient | Evaluate]) -> Tensor:
        """(G, P) the items' parameters, on the device. Raises ValueError for another layout."""
        return self._rows([w.parameters for w in works])

    def _rows(self, vectors: Sequence[Vector]) -> Tensor:
        """(G, P) vectors of the model's layout, on the device; only to be read."""
        layout = self.model.layout
        for vector in vectors:
            if vector.layout is not layout and vector.layout != layout:
                raise ValueError(f"parameters of {self.model.name} are needed, found another layout")
        first = vectors[0].values
        if all(vector.values is first for vector in vectors):
            return first.to(self.learner.device).expand(len(vectors), -1)
        return torch.stack([v.values for v in vectors]).to(self.learner.device)

    def _rates(self, works: Sequence[LocalSGD]) -> Tensor:
        """(G,) each item's learning rate."""
        rates = [w.rate(self.learner) for w in works]
        return torch.tensor(rates, device=self.learner.device)

    def _states(self, works: Sequence[LocalSGD]) -> tuple[Tensor, ...]:
        """The items' optimiser states, stacked: (G, P) and (G, 1)."""
        state = self.learner.optimizer.zeros((len(works),), self.model.layout, self.learner.device)
        for i, work in enumerate(works):
            if work.state is not None:
                for rows, tensor in zip(state, work.state, strict=True):
                    rows[i] = tensor
        return state

    def _vectors(self, values_GP: Tensor, norms: Sequence[float | None] | None = None) -> list[Vector]:
        """The rows as values. They share the group's matrix, which lives as long as any of them: what one
        group trained is mostly wanted, and let go of, at about the same time."""
        rows, layout = values_GP.cpu().unbind(), self.model.layout
        norms = norms or [None] * len(rows)
        return [Vector(layout, row, norm=norm) for row, norm in zip(rows, norms, strict=True)]
