"""Many stacks of dense layers, trained or evaluated side by side, without autograd.

Legend of shape suffixes: G models side by side, B examples of a batch, D a layer's inputs, U its
units, P parameters, K targets. Models lie as rows of a (G, P) matrix; a step is one batched matrix
product per layer and pass, and one optimiser operation on the whole matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edgefl.data import Dataset, LocalData, Task
from edgefl.learning import tasks
from edgefl.learning.learner import Learner, check_examples, check_steps, value_of
from edgefl.learning.model import Model
from edgefl.learning.models.dense import Dense
from edgefl.learning.work import (
    Evaluate,
    Evaluation,
    Gradient,
    GradientResult,
    LocalSGD,
    Trained,
)
from edgefl.parameters import Vector


@dataclass(frozen=True)
class Layer:
    """Where one dense layer lies in the vector, and whether a ReLU follows."""

    weight: slice
    bias: slice
    inputs: int
    units: int
    relu: bool


def dense_layers(model: Model) -> tuple[Layer, ...] | None:
    """The layers of a model that is nothing but dense ones, for float32 inputs; else None."""
    if model.task == "language" or model.layout.dtype is not torch.float32:
        return None
    layers = []
    for name, block in zip(model.blocks, model.build(), strict=True):
        if type(block) is not Dense:
            return None
        weight, bias = model.layout.slice(f"{name}.weight"), model.layout.slice(f"{name}.bias")
        layers.append(Layer(weight, bias, block.in_features, block.out_features, block.relu))
    return tuple(layers)


class Stacks:
    """The arithmetic of G models of one shape: passes over rows of a (G, P) matrix."""

    def __init__(self, task: Task, layers: tuple[Layer, ...]) -> None:
        self.task, self.layers = task, layers

    def forward(self, values_GP: Tensor, x_GBD: Tensor) -> list[Tensor]:
        """The input and each layer's output, (G, B, units); the last one has no ReLU."""
        outputs = [x_GBD]
        for layer in self.layers:
            weight_GUD, bias_G1U = _weight(values_GP, layer), values_GP[:, layer.bias].unsqueeze(1)
            output = torch.baddbmm(bias_G1U, outputs[-1], weight_GUD.transpose(1, 2))
            outputs.append(output.relu_() if layer.relu else output)
        return outputs

    def loss_and_gradient(
        self, values_GP: Tensor, gradient_GP: Tensor, x_GBD: Tensor, y: Tensor, weight_GB: Tensor | None
    ) -> Tensor:
        """Write the gradient of each model's mean loss over its own batch; returns the losses, (G,).

        weight_GB: of each example in its batch's mean; None: all alike.
        """
        outputs = self.forward(values_GP, x_GBD)
        loss_GB, d_GBU = self._output_gradient(outputs[-1], y)
        if weight_GB is None:
            loss_G = loss_GB.mean(1)
            d_GBU.mul_(1 / d_GBU.shape[1])
        else:
            loss_G = (loss_GB * weight_GB).sum(1)
            d_GBU.mul_(weight_GB.unsqueeze(-1))
        for i in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[i]
            if layer.relu:
                d_GBU = torch.ops.aten.threshold_backward(d_GBU, outputs[i + 1], 0)
            # A product into a view with gaps is slower than one of its own and a copy.
            _weight(gradient_GP, layer).copy_(torch.bmm(d_GBU.transpose(1, 2), outputs[i]))
            torch.sum(d_GBU, 1, out=gradient_GP[:, layer.bias])
            if i:
                d_GBU = torch.bmm(d_GBU, _weight(values_GP, layer))
        return loss_G

    def losses(self, output_GBK: Tensor, y: Tensor) -> Tensor:
        """The loss of each example, (G, B)."""
        if self.task == "regression":
            return (output_GBK - y.view(*y.shape[:2], -1)).square().mean(-1)
        return self._cross_entropy(output_GBK, y)[0]

    def _output_gradient(self, output_GBK: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each example, (G, B), and its gradient at the output, (G, B, K)."""
        if self.task == "regression":
            difference = output_GBK - y.view_as(output_GBK)
            return difference.square().mean(-1), difference.mul_(2 / difference.shape[-1])
        loss_GB, total_GB1 = self._cross_entropy(output_GBK, y)
        share_GBK = torch.sub(output_GBK, total_GB1).exp_()
        minus_GB1 = share_GBK.new_full((1, 1, 1), -1.0).expand_as(total_GB1)
        return loss_GB, share_GBK.scatter_add_(-1, y.unsqueeze(-1), minus_GB1)

    def _cross_entropy(self, output_GBK: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each example, (G, B), and the log of the sum of its exponentials, (G, B, 1)."""
        # Over ten classes log_softmax measured five times slower than logsumexp and a subtraction.
        total_GB1 = output_GBK.logsumexp(-1, keepdim=True)
        loss_GB1 = total_GB1 - output_GBK.gather(-1, y.unsqueeze(-1))
        return loss_GB1.squeeze(-1), total_GB1


class Streams:
    """The mini-batches of several nodes from one data set, step by step; nodes with more steps first."""

    def __init__(
        self, x: Tensor, y: Tensor, nodes: Sequence[tuple[LocalData, range]], batch_size: int
    ) -> None:
        """x (n, D), y (n, ...): the data set. nodes: data and steps of each."""
        self.x, self.y = x, y
        self.num_steps = len(nodes[0][1])
        shape = (self.num_steps, len(nodes))
        # Where a batch is short its own first example fills it up, at weight 0.
        index, self._sizes = np.zeros((*shape, batch_size), np.int64), np.zeros(shape, np.int64)
        for g, (data, steps) in enumerate(nodes):
            for s, rows in enumerate(data.batches(steps, batch_size)):
                size = len(rows)
                index[s, g, :size] = rows
                if size < batch_size:
                    index[s, g, size:] = rows[0]
                self._sizes[s, g] = size
        self._index_SGB = torch.from_numpy(index)

    def num_active(self, step: int) -> int:
        """Nodes that still have a batch at this step: the first so many."""
        return int(np.count_nonzero(self._sizes[step]))

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """x (A, B, D), y (A, B, ...) of the A active nodes; weights (A, B) of examples, None if all alike."""
        active = self.num_active(step)
        sizes = self._sizes[step, :active]
        most = int(sizes.max())
        index = self._index_SGB[step, :active, :most].to(self.x.device)
        flat = index.reshape(-1)
        x = self.x.index_select(0, flat).view(active, most, -1)
        y = self.y.index_select(0, flat).view(active, most, *self.y.shape[1:])
        if sizes.min() == most:
            return x, y, None
        size_A1 = torch.from_numpy(sizes).to(self.x.device).unsqueeze(1)
        inside_AB = torch.arange(most, device=self.x.device) < size_A1
        return x, y, inside_AB.to(x.dtype) / size_A1


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
        for work in works:
            check_steps(work.steps, work.data)
        order = sorted(range(len(works)), key=lambda i: -len(works[i].steps))
        results: dict[int, Trained] = dict(zip(order, self._train([works[i] for i in order]), strict=True))
        return [results[i] for i in range(len(works))]

    def _train(self, works: Sequence[LocalSGD]) -> list[Trained]:
        """The same, for items with more steps first: those with fewer drop out of the active rows."""
        optimizer, batch_size = self.learner.optimizer, works[0].workload.batch_size
        streams = self._streams([(w.data, w.steps) for w in works], batch_size)
        values, state = self._values(works), self._states(works)
        gradient, loss = torch.empty_like(values), values.new_zeros(len(works))
        anchor = self._rows([w.anchor or w.parameters for w in works]) if works[0].proximal_mu else None
        corrections = [w.correction for w in works if w.correction is not None]
        shift = self._rows(corrections) if corrections else None
        mu_G1 = values.new_tensor([[w.proximal_mu] for w in works])
        rates = [optimizer.rate(w.round) for w in works]
        rate_G1 = None if min(rates) == max(rates) else values.new_tensor(rates).unsqueeze(1)
        for step in range(streams.num_steps):
            a = streams.num_active(step)
            here, slope = values[:a], gradient[:a]
            loss[:a] += self._stacks.loss_and_gradient(here, slope, *streams.at(step))
            if anchor is not None:
                slope.addcmul_(here - anchor[:a], mu_G1[:a])
            if shift is not None:
                slope.add_(shift[:a])
            optimizer.clip_(slope)
            rate = rates[0] if rate_G1 is None else rate_G1[:a]
            optimizer.step_(here, slope, tuple(t[:a] for t in state), rate)
        sums = loss.tolist()
        return [
            Trained(
                self._vector(values[i]),
                sums[i] / len(work.steps),
                len(work.steps),
                tuple(value_of(t[i]) for t in state) or None,
            )
            for i, work in enumerate(works)
        ]

    def gradients(self, works: Sequence[Gradient]) -> list[GradientResult]:
        """One mini-batch gradient of several nodes on one data set."""
        nodes = [(w.data, range(w.step, w.step + 1)) for w in works]
        streams, values = self._streams(nodes, works[0].workload.batch_size), self._values(works)
        gradient = torch.empty_like(values)
        losses = self._stacks.loss_and_gradient(values, gradient, *streams.at(0)).tolist()
        self.learner.optimizer.clip_(gradient)
        return [GradientResult(self._vector(gradient[i]), losses[i]) for i in range(len(works))]

    def evaluate(self, works: Sequence[Evaluate]) -> list[Evaluation]:
        """Several models on one batch of examples."""
        batch, task, count = works[0].batch, self.model.task, len(works)
        check_examples(batch)
        values = self._values(works)
        loss, correct = values.new_zeros(count, dtype=torch.float64), values.new_zeros(count)
        size = self.learner.evaluated_at_once
        x, y = batch.x.flatten(1).to(values.device), batch.y.to(values.device)
        for x_BD, y_B in zip(torch.split(x, size), torch.split(y, size), strict=True):
            x_GBD = x_BD.expand(count, *x_BD.shape)
            y_GB = y_B.expand(count, *y_B.shape)
            output = self._stacks.forward(values, x_GBD)[-1]
            loss += self._stacks.losses(output, y_GB).sum(1)
            if task == "classification":
                correct += (output.argmax(-1) == y_GB).sum(1)
        found = zip((loss / len(batch)).tolist(), correct.tolist(), strict=True)
        return [Evaluation(mean, len(batch), tasks.metrics(task, mean, k, len(batch))) for mean, k in found]

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
        """(G, P) vectors of the model's layout, on the device."""
        layout = self.model.layout
        for vector in vectors:
            if vector.layout is not layout and vector.layout != layout:
                raise ValueError(f"parameters of {self.model.name} are needed, found another layout")
        return torch.stack([v.values for v in vectors]).to(self.learner.device)

    def _states(self, works: Sequence[LocalSGD]) -> tuple[Tensor, ...]:
        """The items' optimiser states, stacked: (G, P) and (G, 1)."""
        state = self.learner.optimizer.zeros((len(works),), self.model.layout, self.learner.device)
        for i, work in enumerate(works):
            if work.state is not None:
                for rows, tensor in zip(state, work.state, strict=True):
                    rows[i] = tensor
        return state

    def _vector(self, row: Tensor) -> Vector:
        # A copy: a view would keep the rows of the whole group alive.
        return Vector(self.model.layout, value_of(row))


def _weight(values_GP: Tensor, layer: Layer) -> Tensor:
    """(G, U, D) a layer's weights in each model, as a view."""
    return values_GP[:, layer.weight].view(-1, layer.units, layer.inputs)
