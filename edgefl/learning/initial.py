"""Initial parameters, drawn by key: the same on every node, whatever else was drawn before."""

from __future__ import annotations

import math
import zlib
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.keyed import generator


@runtime_checkable
class SelfInitialised(Protocol):
    """A block that changes the initial values of its parts, after they have been drawn."""

    def initialise(self) -> None: ...


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Set all parameters: He-normal weights and zero biases for dense and convolutional layers,
    normal embeddings of deviation 0.1, PyTorch's uniform range for an LSTM; scales of norms stay 1.

    Source: He et al. 2015, https://arxiv.org/abs/1502.01852.
    """
    for name, part in module.named_modules():
        rng = generator(seed, "init", zlib.crc32(name.encode()))
        if isinstance(part, nn.Linear | nn.Conv2d):
            fan_in = part.weight[0].numel()
            _normal(part.weight, math.sqrt(2 / fan_in), rng)
            if part.bias is not None:
                part.bias.zero_()
        elif isinstance(part, nn.Embedding):
            _normal(part.weight, 0.1, rng)
        elif isinstance(part, nn.LSTM):
            bound = 1 / math.sqrt(part.hidden_size)
            for parameter in part.parameters():
                drawn = rng.random(tuple(parameter.shape), dtype=np.float32)
                parameter.copy_(torch.from_numpy(drawn * np.float32(2 * bound) - np.float32(bound)))
    for part in module.modules():
        if isinstance(part, SelfInitialised):
            part.initialise()


def _normal(weight: Tensor, deviation: float, rng: np.random.Generator) -> None:
    drawn = rng.standard_normal(tuple(weight.shape), dtype=np.float32)
    weight.copy_(torch.from_numpy(drawn)).mul_(deviation)
