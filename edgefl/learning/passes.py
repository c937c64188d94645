"""Passes through many stacks of dense layers side by side, without autograd and without the interpreter.

The functions below are plain Python; `compiled` has torch compile their source, so that one call goes through
many small operators without holding the interpreter's lock: threads then train side by side, and beside the
program's own events. The operators and their order are the same, and so are the results, bit for bit. In them
can only be what torch's script language knows.

Legend of shape suffixes: S steps, G models side by side, B examples of a batch, D a layer's inputs, U its
units, K outputs. weights: (G, U, D) of each layer; biases: (G, U); relus: whether a ReLU follows. Hidden
layers lie example by example, (G, B, U), the last one output by output, (G, K, B): over few outputs a softmax
along the last dimension measured eight times slower than along the one before.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor


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


def gradient(
    weights: list[Tensor],
    biases: list[Tensor],
    relus: list[bool],
    regression: bool,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    into_weights: list[Tensor],
    into_biases: list[Tensor],
) -> Tensor:
    """Write the gradient of each model's weighted loss over its own batch; returns the losses, (G, B).

    weight (G, B): of each example in its batch's mean.
    """
    outputs = forward(weights, biases, relus, x)
    loss, slope = output_slope(outputs[-1], y, weight, regression)
    backward(weights, relus, outputs, slope, into_weights, into_biases, False)
    return loss


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
    for s in range(len(active)):
        a = active[s]
        w, b = [t[:a] for t in weights], [t[:a] for t in biases]
        outputs = forward(w, b, relus, x[s, :a])
        loss, slope = output_slope(outputs[-1], y[s, :a], move[s, :a], regression)
        backward(w, relus, outputs, slope, w, b, True)
        losses[s, :a] = loss
    return losses


@functools.cache
def compiled() -> Any:
    """`forward`, `output_slope`, `gradient` and `descend`, to be called as here."""
    functions = (forward, output_slope, backward, gradient, descend)
    return torch.jit.CompilationUnit("\n".join(inspect.getsource(function) for function in functions))
