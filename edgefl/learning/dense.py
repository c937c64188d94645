"""Many stacks of dense layers, trained or evaluated side by side, without autograd.

Legend of shape suffixes: G models side by side, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from edgefl.parameters.deferred import Order

Run = tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]
"""New models (G, P), sums over the steps of their losses (G,), the models' norms (G,), which are wanted of
every report that a server takes in, and the optimiser's states."""


@dataclass(frozen=True)
class Prepared:
    """A group whose items lie ready as tensors.

    call: the arithmetic, in any thread; hardly any of it holds the interpreter's lock. results: what each
    item comes to, from what the call returned. Whoever prepares asks for the results too: threads that make
    objects side by side only wait for each other.
    """

    call: Callable[[], Any]
    results: Callable[[Any], Sequence[object]]


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

    def prepared(self, works: Sequence[LocalSGD | Gradient | Evaluate]) -> Prepared:
        """A group of one kind, ready to be carried out. Raises what its items would, one at least."""
        if isinstance(works[0], LocalSGD):
            return self._training([w for w in works if isinstance(w, LocalSGD)])
        if isinstance(works[0], Gradient):
            return self._gradients([w for w in works if isinstance(w, Gradient)])
        return self._evaluations([w for w in works if isinstance(w, Evaluate)])

    def _training(self, works: Sequence[LocalSGD]) -> Prepared:
        """Local training of several nodes on one data set, side by side: those with more steps first, so that
        those with fewer drop out of the active rows."""
        steps = [work.steps for work in works]
        for work, mine in zip(works, steps, strict=True):
            check_steps(mine, work.data)
        order = sorted(range(len(works)), key=lambda i: -len(steps[i]))
        sorted_works, counts = [works[i] for i in order], [len(steps[i]) for i in order]
        streams = self._streams([(works[i].data, steps[i]) for i in order], works[0].workload.batch_size)
        bent = works[0].proximal_mu or works[0].correction is not None
        plain = self.learner.optimizer.is_plain and not bent
        run = (self._descend if plain else self._optimise)(sorted_works, streams)
        return Prepared(run, partial(self._trained, order, counts))

    def _trained(self, order: Sequence[int], counts: Sequence[int], run: Run) -> list[Trained]:
        """What came of it, in the order in which the items were given."""
        values, loss, norms, state = run
        # The vectors share the group's matrix, which lives as long as any of them: what one group trained is
        # mostly wanted, and let go of, at about the same time.
        vectors = Vector.rows(self.model.layout, values.cpu(), norms.tolist())
        results: dict[int, Trained] = {}
        for row, (i, count, total) in enumerate(zip(order, counts, loss.tolist(), strict=True)):
            own = tuple([value_of(t[row]) for t in state]) if state else None
            results[i] = Trained(vectors[row], total / count, count, own)
        return [results[i] for i in range(len(order))]

    def _descend(self, works: Sequence[LocalSGD], streams: Streams) -> Callable[[], Run]:
        """Steps of plain SGD."""
        models, rates = self._models(works), self._rates(works)

        def run() -> Run:
            new, loss = self._stacks.train(models, streams, rates)
            return new, loss, torch.linalg.vector_norm(new, dim=1), ()

        return run

    def _optimise(self, works: Sequence[LocalSGD], streams: Streams) -> Callable[[], Run]:
        """Steps of any optimiser."""
        optimizer = self.learner.optimizer
        models, state, rate_G1 = self._models(works), self._states(works), self._rates(works).unsqueeze(1)
        anchors = self._order([w.anchor or w.parameters for w in works]) if works[0].proximal_mu else None
        corrections = [w.correction for w in works if w.correction is not None]
        shifts = self._order(corrections) if corrections else None
        mu_G1 = torch.tensor([[w.proximal_mu] for w in works], device=self.learner.device)

        def run() -> Run:
            values = self._rows(models).clone(memory_format=torch.contiguous_format)
            loss = values.new_zeros(len(works))
            anchor = None if anchors is None else self._rows(anchors)
            shift = None if shifts is None else self._rows(shifts)
            for step, a in enumerate(streams.active):
                here = values[:a]
                slope, losses = self._stacks.slopes(here, streams, step)
                loss[:a] += losses
                if anchor is not None:
                    slope.addcmul_(here - anchor[:a], mu_G1[:a])
                if shift is not None:
                    slope.add_(shift[:a])
                optimizer.clip_(slope)
                optimizer.step_(here, slope, tuple(t[:a] for t in state), rate_G1[:a])
            return values, loss, torch.linalg.vector_norm(values, dim=1), state

        return run

    def _gradients(self, works: Sequence[Gradient]) -> Prepared:
        """One mini-batch gradient of several nodes on one data set."""
        nodes = [(w.data, range(w.step, w.step + 1)) for w in works]
        streams, models = self._streams(nodes, works[0].workload.batch_size), self._models(works)

        def found(run: tuple[Tensor, Tensor]) -> list[GradientResult]:
            gradient, losses = run
            self.learner.optimizer.clip_(gradient)
            pairs = zip(Vector.rows(self.model.layout, gradient.cpu()), losses.tolist(), strict=True)
            return [GradientResult(vector, loss) for vector, loss in pairs]

        return Prepared(partial(self._stacks.gradients, models, streams), found)

    def _evaluations(self, works: Sequence[Evaluate]) -> Prepared:
        """Several models on one batch of examples."""
        batch, models, device = works[0].batch, self._models(works), self.learner.device
        check_examples(batch)
        x, y, n = batch.x.flatten(1).to(device), batch.y.to(device), len(batch)

        def run() -> tuple[Tensor, Tensor]:
            values = self._rows(models)
            size = self.learner.evaluated_at_once
            loss = values.new_zeros(len(works), dtype=torch.float64)
            right = values.new_zeros(len(works))
            for some_x, some_y in zip(torch.split(x, size), torch.split(y, size), strict=True):
                some_loss, some_right = self._stacks.evaluate(values, some_x, some_y)
                loss += some_loss
                right += some_right
            return loss, right

        def found(sums: tuple[Tensor, Tensor]) -> list[Evaluation]:
            loss, right = sums
            pairs = zip((loss / n).tolist(), right.tolist(), strict=True)
            task = self.model.task
            return [Evaluation(mean, n, tasks.metrics(task, mean, k, n)) for mean, k in pairs]

        return Prepared(run, found)

    def _streams(self, nodes: Sequence[tuple[LocalData, range]], batch_size: int) -> Streams:
        dataset = nodes[0][0].dataset
        if dataset not in self._data:
            device = self.learner.device
            self._data[dataset] = dataset.x_train.flatten(1).to(device), dataset.y_train.to(device)
        return Streams(*self._data[dataset], nodes, batch_size)

    def _models(self, works: Sequence[LocalSGD | Gradient | Evaluate]) -> Order:
        """The items' parameters. Raises ValueError for another layout."""
        return self._order([w.parameters for w in works])

    def _order(self, vectors: Sequence[Vector]) -> Order:
        """Vectors of the model's layout, to be stacked where they are needed."""
        layout = self.model.layout
        for vector in vectors:
            if vector.layout is not layout and vector.layout != layout:
                raise ValueError(f"parameters of {self.model.name} are needed, found another layout")
        return Order(vectors)

    def _rows(self, models: Order) -> Tensor:
        """(G, P) on the device; only to be read."""
        return self._stacks.rows(models).to(self.learner.device)

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
