"""Passes through many stacks of dense layers side by side, without autograd and without the interpreter.

The functions below are plain Python; `compiled` has torch compile their source, so that one call goes through
many small operators without holding the interpreter's lock: threads then train side by side, and beside the
program's own events. The operators and their order are the same, and so are the results, bit for bit. In them
can only be what torch's script language knows.

`train` and `gradients` return Python's tensors, too. Else they would let go of each at its last use, and
torch takes the interpreter's lock when nobody but Python holds a tensor any more: beside a busy thread a
group of 8 waited for it again and again, and was there after 1.6 ms in place of 1.2.

Legend of shapes: S steps, G models side by side, P parameters, B examples of a batch, D a layer's inputs, U
its units, K outputs. values (G, P): models as rows. places: of each layer where its weights and its biases
begin in a row, its units and its inputs; relus: whether a ReLU follows. weights: (G, U, D) of each layer;
biases: (G, U). Hidden layers lie example by example, (G, B, U), the last one output by output, (G, K, B):
over few outputs a softmax along the last dimension measured eight times slower than along the one before.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from edgefl.parameters.deferred import made, stacked


def forward(weights: list[Tensor], biases: list[Tensor], relus: list[bool], x: Tensor) -> list[Tensor]:
    """The input (G, B, D), each hidden layer's output (G, B, U), and the last one's (G, K, B)."""
    outputs = [x]
    last = len(weights) - 1
    for i in range(last):
        output = torch.baddbmm(biases[i].unsqueeze(1), outputs[i], weights[i].transpose(1, 2))
        outputs.append(output.relu_() if relus[i] else output)
    outputs.append(torch.baddbmm(biases[last].unsqueeze(2), weights[last], outputs[last].transpose(1, 2)))
    return outputs


def output_slope(output: Tensor, y: Tensor, factor: Tensor, regression: bool) -> tuple[Tensor, Tensor]:
    """The loss of each example, (G, B), and its gradient at the output times a factor (G, B): (G, K, B).

    y: (G, B) classes, or (G, B, ...) values of a regression.
    """
    if regression:
        difference = output - y.flatten(2).transpose(1, 2)
        loss = difference.square().mean(1)
        return loss, difference.mul_(factor.unsqueeze(1) * (2 / difference.size(1)))
    chosen = y.unsqueeze(1)
    log_share = torch.log_softmax(output, 1)
    loss = log_share.gather(1, chosen).squeeze(1).neg_()
    minus = log_share.new_full((1, 1, 1), -1.0).expand_as(chosen)
    return loss, log_share.exp_().scatter_add_(1, chosen, minus).mul_(factor.unsqueeze(1))


def backward(
    weights: list[Tensor],
    relus: list[bool],
    outputs: list[Tensor],
    slope: Tensor,
    into_weights: list[Tensor],
    into_biases: list[Tensor],
    adding: bool,
) -> None:
    """Write the gradients from the slope (G, K, B) at the output, or add them; into the weights themselves
    they can be added too, as those of a layer are not needed any more when its gradient is."""
    d = slope.transpose(1, 2)
    for i in range(len(weights) - 1, -1, -1):
        if relus[i]:
            d = torch.ops.aten.threshold_backward(d, outputs[i + 1], 0)
        below = torch.bmm(d, weights[i]) if i > 0 else d
        if adding:
            into_weights[i].baddbmm_(d.transpose(1, 2), outputs[i])
            into_biases[i].add_(d.sum(1))
        else:
            # A product into a view with gaps is slower than one of its own and a copy.
            into_weights[i].copy_(torch.bmm(d.transpose(1, 2), outputs[i]))
            into_biases[i].copy_(d.sum(1))
        d = below


def layers_of(values: Tensor, places: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and biases as views of the rows."""
    weights, biases = [values[:0]], [values[:0]]
    for weight, bias, units, inputs in places:
        weights.append(values[:, weight : weight + units * inputs].view(-1, units, inputs))
        biases.append(values[:, bias : bias + units])
    return weights[1:], biases[1:]


def slopes(
    values: Tensor,
    places: list[list[int]],
    relus: list[bool],
    regression: bool,
    x: Tensor,
    y: Tensor,
    index: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradient of each model's mean loss over its own batch, (G, P), and these losses, (G,).

    x (n, D), y (n, ...): the data set. index (G, B): the batches; weight (G, B): of each example in its mean.
    """
    weights, biases = layers_of(values, places)
    into = torch.empty_like(values, memory_format=torch.contiguous_format)
    into_weights, into_biases = layers_of(into, places)
    flat, shape = index.flatten(), [index.size(0), index.size(1)]
    outputs = forward(weights, biases, relus, torch.unflatten(x.index_select(0, flat), 0, shape))
    labels = torch.unflatten(y.index_select(0, flat), 0, shape)
    losses, slope = output_slope(outputs[-1], labels, weight, regression)
    backward(weights, relus, outputs, slope, into_weights, into_biases, False)
    return into, losses.mul_(weight).sum(1)


def gradients(
    models: tuple[list[Tensor], list[list[int]], list[list[float]], list[int]],
    places: list[list[int]],
    relus: list[bool],
    regression: bool,
    x: Tensor,
    y: Tensor,
    index: Tensor,
    weight: Tensor,
) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    """What had to be made of the models (see `stacked`), their `slopes`, and what was given."""
    found, rows = stacked(models)
    into, losses = slopes(rows.to(x.device), places, relus, regression, x, y, index, weight)
    return found, into, losses, models[0] + [x, y, index, weight]


def descend(
    weights: list[Tensor],
    biases: list[Tensor],
    relus: list[bool],
    regression: bool,
    x: Tensor,
    y: Tensor,
    move: Tensor,
    active: list[int],
) -> Tensor:
    """Steps of plain SGD in place; returns the losses before each, (S, G, B).

    No gradient is ever stored: each product is added to the weights as it is formed.

    weights, biases: contiguous. x (S, G, B, D), y (S, G, B, ...): the batches. move (S, G, B): the weight of
    each example in its batch's mean, times minus the model's rate. active: how many models have each step.
    """
    losses = torch.zeros_like(move)
    w, b, now = weights, biases, move.size(1)
    for s in range(len(active)):
        a = active[s]
        if a < now:
            w, b, now = [t[:a] for t in weights], [t[:a] for t in biases], a
        outputs = forward(w, b, relus, x[s, :a])
        loss, slope = output_slope(outputs[-1], y[s, :a], move[s, :a], regression)
        backward(w, relus, outputs, slope, w, b, True)
        losses[s, :a] = loss
    return losses


def train(
    models: tuple[list[Tensor], list[list[int]], list[list[float]], list[int]],
    places: list[list[int]],
    relus: list[bool],
    regression: bool,
    x: Tensor,
    y: Tensor,
    index: Tensor,
    weight: Tensor,
    rates: Tensor,
    active: list[int],
    at_once: int,
) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    """Plain SGD: what had to be made of the models (see `stacked`), the new ones, (G, P), the sums over the
    steps of their batches' losses, (G,), and what was given.

    index, weight (S, G, B): as for `slopes`, step by step. rates: (G,). active: how many models have each
    step, the first ones. at_once: steps whose examples are gathered at a time.
    """
    found, rows = stacked(models)
    values = rows.to(x.device)
    views, bias_views = layers_of(values, places)
    weights = [t.clone(memory_format=torch.contiguous_format) for t in views]
    biases = [t.clone(memory_format=torch.contiguous_format) for t in bias_views]
    move, total = weight * -rates.view(1, -1, 1), torch.zeros_like(rates)
    for start in range(0, len(active), at_once):
        stop = min(start + at_once, len(active))
        a, part = active[start], index[start:stop, : active[start]]
        flat, shape = part.flatten(), [part.size(0), part.size(1), part.size(2)]
        losses = descend(
            [t[:a] for t in weights],
            [t[:a] for t in biases],
            relus,
            regression,
            torch.unflatten(x.index_select(0, flat), 0, shape),
            torch.unflatten(y.index_select(0, flat), 0, shape),
            move[start:stop, :a],
            active[start:stop],
        )
        total[:a] += losses.mul_(weight[start:stop, :a]).sum([0, 2])
    new = torch.empty_like(values, memory_format=torch.contiguous_format)
    into_weights, into_biases = layers_of(new, places)
    for i in range(len(weights)):
        into_weights[i].copy_(weights[i])
        into_biases[i].copy_(biases[i])
    return found, new, total, models[0] + [x, y, index, weight, rates]


def evaluate(
    values: Tensor, places: list[list[int]], relus: list[bool], regression: bool, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Of each model on the same examples x (n, D), y (n, ...): the sum of its losses and of right classes."""
    count, shape = values.size(0), [values.size(0)]
    shape.extend(y.size())
    weights, biases = layers_of(values, places)
    output = forward(weights, biases, relus, x.expand([count, x.size(0), x.size(1)]))[-1]
    labels = y.expand(shape)
    right = torch.zeros_like(values[:, 0])
    if not regression:
        right += (output.argmax(1) == labels).sum(1)
    losses, _ = output_slope(output, labels, torch.ones_like(values[:, :1]), regression)
    return losses.sum(1), right


@functools.cache
def compiled() -> Any:
    """`stacked`, `slopes`, `gradients`, `descend`, `train` and `evaluate`, to be called as here."""
    functions = (
        made, stacked, forward, output_slope, backward, layers_of, slopes, gradients, descend, train, evaluate
    )  # fmt: skip
    return torch.jit.CompilationUnit("\n".join(inspect.getsource(function) for function in functions))
