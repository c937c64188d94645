"""Adaptive optimisers at a server: FedAdagrad, FedAdam and FedYogi differ in one line, v's.

Source: Reddi et al. 2021, Algorithm 2 (https://arxiv.org/abs/2003.00295). Delta_t = sum_R w_k (y_k - x)
points downhill; m <- beta1 m + (1 - beta1) Delta; v by kind; x <- x + eta_g m / (sqrt(v) + tau), element by
element.
Choices: m starts at 0 and v at tau^2, the least that the paper allows; with bias_correction, which the
paper has not, v starts at 0 and both are divided by 1 - beta^t, as Adam does. Floating-point buffers take
the mean as it is. A void round changes neither m nor v.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from edgefl.parameters import Vector
from edgefl.patterns.rounds import RoundConfig

Kind = Literal["adagrad", "adam", "yogi"]


class ServerOptimizerConfig(RoundConfig):
    """FedAvg's rules of a round, and the server's optimiser."""

    weighting: Literal["samples", "uniform", "unbiased"] = "samples"
    """w_k, as in FedAvg."""
    server_rate: float = Field(default=0.1, gt=0)
    """eta_g."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    tau: float = Field(default=1e-3, gt=0)
    """The paper's degree of adaptivity: the smaller, the more."""
    bias_correction: bool = False
    """Adam's, which the paper leaves out."""


def second_moment(kind: Kind, v: Tensor, delta: Tensor, beta2: float) -> Tensor:
    """v after a step, (d,), from v and Delta (d,)."""
    square = delta.square()
    if kind == "adagrad":
        return v + square
    if kind == "adam":
        return beta2 * v + (1 - beta2) * square
    return v - (1 - beta2) * square * torch.sign(v - square)


def adaptive_step(
    kind: Kind, config: ServerOptimizerConfig, x: Vector, delta: Vector, state: Any
) -> tuple[Vector, Any]:
    """The new model and state (m, v, steps so far); state None at the first step."""
    beta1, beta2, d = config.beta1, config.beta2, delta.values
    start = torch.zeros_like if config.bias_correction else lambda t: torch.full_like(t, config.tau**2)
    m, v, steps = state or (torch.zeros_like(d), start(d), 0)
    m = beta1 * m + (1 - beta1) * d
    v = second_moment(kind, v, d, beta2)
    steps += 1
    m_hat, v_hat = m, v
    if config.bias_correction:
        m_hat = m / (1 - beta1**steps)
        v_hat = v if kind == "adagrad" else v / (1 - beta2**steps)
    step = config.server_rate * m_hat / (v_hat.sqrt() + config.tau)
    return (x + delta).with_values(x.values + step), (m, v, steps)
