"""Optimisers as functions of flat vectors, with PyTorch's formulas.

torch.optim is not used: its first import takes about a second, and it loops over parameters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from edgefl.errors import ConfigError
from edgefl.learning.workload import TrainConfig
from edgefl.parameters import Layout, Vector

State = tuple[Tensor, ...]


class Optimizer:
    """What [train] says about a step. Holds no state: that is a value which the caller keeps.

    The state is None for plain SGD, (momentum (P,),) for SGD with momentum, and
    (mean (P,), mean square (P,), steps so far (1,)) for Adam and AdamW.
    Source: torch.optim.SGD, Adam and AdamW, https://pytorch.org/docs/stable/optim.html.
    """

    def __init__(self, train: TrainConfig, total_rounds: int | None = None) -> None:
        """total_rounds: [stop] rounds, the cosine schedule's length unless train.schedule_rounds is set.

        Raises ConfigError when a cosine has no length, or nesterov no momentum.
        """
        self.train, self.schedule_rounds = train, train.schedule_rounds or total_rounds
        if train.schedule == "cosine" and self.schedule_rounds is None:
            raise ConfigError("train.schedule_rounds", None, "a cosine needs it, or stop.rounds")
        if train.nesterov and not train.momentum:
            raise ConfigError("train.nesterov", True, "it needs train.momentum above 0")
        self._adam = train.optimizer != "sgd"
        bent = train.momentum or train.weight_decay or train.clip_norm is not None
        self.is_plain = not (self._adam or bent)
        """Whether a step is parameters - rate gradient, and nothing else."""

    def rate(self, round: int) -> float:
        """The learning rate of a round, from 0: the schedule's, times the warm-up's share."""
        train = self.train
        rate = train.learning_rate
        if train.schedule == "step":
            rate *= train.decay ** (round // train.decay_rounds)
        elif train.schedule == "cosine":
            assert self.schedule_rounds is not None
            rate *= (1 + math.cos(math.pi * min(round / self.schedule_rounds, 1.0))) / 2
        if round < train.warmup_rounds:
            rate *= (round + 1) / train.warmup_rounds
        return rate

    @property
    def state_sizes(self) -> tuple[int | None, ...]:
        """Values in each tensor of the state; None stands for one per parameter."""
        if self._adam:
            return (None, None, 1)
        return (None,) if self.train.momentum else ()

    def init(self, layout: Layout) -> State | None:
        """The state before the first step; None where there is none."""
        return self.zeros((), layout) or None

    def zeros(self, lead: tuple[int, ...], layout: Layout, device: torch.device | str = "cpu") -> State:
        """The state before the first step of `lead` optimisers at once: tensors (*lead, P) or (*lead, 1)."""
        sizes = [layout.size if size is None else size for size in self.state_sizes]
        return tuple(torch.zeros(*lead, size, dtype=layout.dtype, device=device) for size in sizes)

    def step(
        self, parameters: Vector, gradient: Vector, state: State | None, round: int
    ) -> tuple[Vector, State | None]:
        """One step: the new parameters and state; nothing that was given changes.

        gradient: not clipped here, as Gradient has done that. Its buffers are what the pass took off the
        parameters' buffers, and are taken off in full, whatever the rate.
        """
        if self.is_plain and not parameters.buffers:
            return parameters.moved(gradient, -self.rate(round)), None
        values, gradients = parameters.values.clone(), gradient.values.clone()
        old = state if state is not None else self.zeros((), parameters.layout)
        new = tuple(t.clone() for t in old)
        self.step_(values, gradients, new, self.rate(round))
        pairs = zip(parameters.buffers, gradient.buffers, strict=True)
        buffers = tuple(b - g if b.is_floating_point() else torch.maximum(b, g) for b, g in pairs)
        return Vector(parameters.layout, values, buffers), new or None

    def step_(self, parameters: Tensor, gradient: Tensor, state: State, rate: float | Tensor) -> None:
        """One step in place: parameters and gradient (P,), or (G, P) for G optimisers side by side.

        state: as from `zeros`; changed. gradient: used up. rate: one, or (G, 1).
        """
        decay = self.train.weight_decay
        if decay and self.train.optimizer == "adamw":
            parameters.mul_(1 - rate * decay)
        elif decay:
            gradient.add_(parameters, alpha=decay)
        if self._adam:
            self._adam_(parameters, gradient, state, rate)
            return
        if self.train.momentum:
            momentum = state[0].mul_(self.train.momentum).add_(gradient)
            if self.train.nesterov:
                gradient.add_(momentum, alpha=self.train.momentum)
            else:
                gradient = momentum
        if isinstance(rate, Tensor):
            parameters.addcmul_(gradient, rate, value=-1)
        else:
            parameters.add_(gradient, alpha=-rate)

    def _adam_(self, parameters: Tensor, gradient: Tensor, state: State, rate: float | Tensor) -> None:
        mean, square, steps = state
        beta1, beta2 = self.train.betas
        steps.add_(1)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = torch.div(square, _unbiased(beta2, steps), out=gradient).sqrt_().add_(self.train.eps)
        # steps is (..., 1), so the step size is one number per optimiser.
        size = rate / _unbiased(beta1, steps)
        parameters.sub_(torch.div(mean, denominator, out=gradient).mul_(size))

    def clip_(self, gradient: Tensor) -> None:
        """Scale gradients (P,) or (G, P) in place to at most clip_norm each, as clip_grad_norm_ does."""
        if self.train.clip_norm is None:
            return
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        gradient.mul_((self.train.clip_norm / (norm + 1e-6)).clamp_(max=1))


def _unbiased(beta: float, steps: Tensor) -> Tensor:
    """1 - beta^steps, in float64 until the end: float32 would lose four digits at the first steps."""
    if beta == 0:
        return torch.ones_like(steps)
    return torch.expm1(steps.double() * math.log(beta)).neg_().to(steps.dtype)
