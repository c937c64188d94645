"""Work items: what a program asks its processor to do. Inert data, frozen when `compute` is called.

A work item never draws from a shared cursor, never changes what it was given, and returns new values,
so it may be carried out later, elsewhere, and in a batch with others of the same `batch_key`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from edgefl.data import Batch, LocalData, WeightedData
from edgefl.errors import ConfigError
from edgefl.learning import tasks
from edgefl.learning.cost import Cost
from edgefl.learning.work_costs import (
    batch_sizes,
    forward_cost,
    gradient_cost,
    local_cost,
    num_examples_in,
    stage_backward_cost,
    stage_forward_cost,
)
from edgefl.learning.workload import Workload
from edgefl.parameters import Vector

if TYPE_CHECKING:
    from edgefl.learning.learner import Learner
    from edgefl.learning.model import Model
    from edgefl.learning.tapes import Tape


@dataclass(frozen=True, eq=False)
class Work:
    """One item of work for a processor."""

    def cost(self, learner: Learner) -> Cost:
        """What it takes, known before it is done."""
        raise NotImplementedError

    def run(self, learner: Learner) -> Any:
        """Carry it out by itself."""
        raise NotImplementedError

    def batch_key(self, learner: Learner) -> Hashable | None:
        """Items with equal keys may become one vectorised step; None: always by itself."""
        return None


@dataclass(frozen=True, eq=False)
class Trained:
    """What local training returns. loss: mean over the steps; state: the optimiser's, None if it has none."""

    parameters: Vector
    loss: float
    num_steps: int
    state: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, eq=False)
class LocalSGD(Work):
    """Local training from `parameters`: the workload's steps, with [train]'s optimiser and rate of `round`.

    The mini-batches are steps round x n, ..., (round + 1) x n - 1 of the data's endless stream, n the
    workload's number of steps, so that consecutive rounds go on where the last one stopped.
    proximal_mu: adds mu (y - anchor) to each gradient (FedProx), before it is clipped; anchor: where the
    round began, `parameters` where None. correction: added to each gradient (SCAFFOLD), before it is clipped.
    state: the optimiser's, carried over from an earlier item; fresh where None. part: only these of the
    round's steps, counted from 0. model: a narrower one (Model.narrow) that `parameters` are of; the run's
    where None. Returns Trained. Raises ValueError for a node without data.
    """

    parameters: Vector
    data: LocalData
    round: int
    workload: Workload
    proximal_mu: float = 0.0
    state: tuple[Tensor, ...] | None = None
    anchor: Vector | None = None
    correction: Vector | None = None
    part: range | None = None
    model: Model | None = None

    @property
    def steps(self) -> range:
        """The steps of the data's stream that this item covers."""
        n = self.workload.num_steps(len(self.data))
        steps = range(self.round * n, (self.round + 1) * n)
        return steps if self.part is None else steps[self.part.start : self.part.stop]

    def rate(self, learner: Learner) -> float:
        """The learning rate of its steps."""
        return learner.optimizer.rate(self.round) * self.workload.rate_factor

    def cost(self, learner: Learner) -> Cost:
        model, batch_size = self.model or learner.model, self.workload.batch_size
        batches = batch_sizes(len(self.data), batch_size, self.steps)
        key = "local SGD", model, batch_size, batches
        known = learner.costs.get(key)
        if known is None:
            state = learner.state_bytes(model)
            known = learner.costs[key] = local_cost(model, batch_size, batches, state)
        return known

    def run(self, learner: Learner) -> Trained:
        parameters, loss, state = learner.local_sgd(
            self.parameters,
            self.data,
            self.steps,
            self.workload.batch_size,
            self.rate(learner),
            self.proximal_mu,
            self.state,
            None if self.anchor is None else self.anchor.values,
            None if self.correction is None else self.correction.values,
            self.model,
        )
        return Trained(parameters, loss, len(self.steps), state)

    def batch_key(self, learner: Learner) -> Hashable | None:
        more = bool(self.proximal_mu), self.correction is not None
        return _stream_key("local SGD", self.data, self.workload, self.model or learner.model, *more)


@dataclass(frozen=True, eq=False)
class GradientResult:
    """gradient: of the mean loss of the mini-batch at the given parameters.

    Its floating-point buffers are what the pass took off the parameters' buffers, its counters the new
    ones: Optimizer.step takes them over in full.
    """

    gradient: Vector
    loss: float


@dataclass(frozen=True, eq=False)
class Gradient(Work):
    """One mini-batch gradient at `parameters`; step: which batch of the data's endless stream.

    Clipped to [train]'s clip_norm; weight decay is the optimiser's. Returns GradientResult.
    """

    parameters: Vector
    data: LocalData
    step: int
    workload: Workload

    def cost(self, learner: Learner) -> Cost:
        model, batch_size = learner.model, self.workload.batch_size
        batches = batch_sizes(len(self.data), batch_size, range(self.step, self.step + 1))
        key = "gradient", model, batch_size, batches
        known = learner.costs.get(key)
        if known is None:
            known = learner.costs[key] = gradient_cost(model, num_examples_in(batches), batch_size)
        return known

    def run(self, learner: Learner) -> GradientResult:
        scratch = learner.scratch(learner.model)
        scratch.load(self.parameters)
        loss = scratch.loss_and_gradient(self.data.batch(self.step, self.workload.batch_size))
        learner.optimizer.clip_(scratch.gradient)
        return GradientResult(scratch.gradient_vector(self.parameters), float(loss))

    def batch_key(self, learner: Learner) -> Hashable | None:
        return _stream_key("gradient", self.data, self.workload)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """loss: mean over the examples; metrics: by name, the task's own first (accuracy, rmse, perplexity)."""

    loss: float
    num_examples: int
    metrics: dict[str, float]


@dataclass(frozen=True, eq=False)
class Evaluate(Work):
    """Loss and metrics of `parameters` on a batch of examples, as large as you like. Returns Evaluation.

    Buffers are used, not changed. Raises ValueError for an empty batch.
    """

    parameters: Vector
    batch: Batch

    def cost(self, learner: Learner) -> Cost:
        return forward_cost(learner.model, len(self.batch), learner.evaluated_at_once)

    def run(self, learner: Learner) -> Evaluation:
        found = learner.measure(self.parameters, self.batch)
        metrics = tasks.metrics(learner.model.task, found.loss, found.correct, found.num_targets)
        return Evaluation(found.loss, len(self.batch), metrics)

    def batch_key(self, learner: Learner) -> Hashable | None:
        # Items of one group hold the tensors, so their ids stay theirs.
        return ("evaluate", id(self.batch.x), id(self.batch.y))


@dataclass(frozen=True, eq=False)
class StageForward(Work):
    """The forward pass of a stage: `x` (B, ...) to the smashed data at its end, a plain tensor.

    keep: hold what a StageBackward with `kept` at these very inputs needs; otherwise it is recomputed there.
    Batch statistics are those of the batch; running ones are left to StageBackward, so that they move
    once per step.
    """

    stage: Model
    parameters: Vector
    x: Tensor
    keep: bool = False

    def cost(self, learner: Learner) -> Cost:
        return stage_forward_cost(self.stage, len(self.x))

    def run(self, learner: Learner) -> Tensor:
        if self.keep:
            return learner.tapes.forward(self.stage, self.parameters, self.x)
        return self._run(learner)

    @torch.no_grad()
    def _run(self, learner: Learner) -> Tensor:
        scratch = learner.scratch(self.stage)
        scratch.load(self.parameters)
        output = scratch.forward(scratch.inputs(self.x), training=True)
        return output.to("cpu").contiguous()


@dataclass(frozen=True, eq=False)
class StageGradient:
    """input: gradient at the stage's input, None if it was not asked for; parameters: at its parameters.

    The buffers of parameters are as in GradientResult.
    """

    parameters: Vector
    input: Tensor | None
    loss: float | None = None


@dataclass(frozen=True, eq=False)
class StageBackward(Work):
    """The backward pass of a stage at `x`, from the gradient at its output or, at the end, from labels.

    Exactly one of output_gradient (as the output) and labels is given; with labels, the loss is the
    task's, mean over the batch. kept: a StageForward with `keep` at these inputs went before, and its
    forward pass is not charged again; it is found by the very objects, and made again where it is not
    held any more, with the same result. Returns StageGradient; tokens have no gradient. Nothing is
    clipped: the norm of the whole model's gradient is not known here.
    """

    stage: Model
    parameters: Vector
    x: Tensor
    output_gradient: Tensor | None = None
    labels: Tensor | None = None
    input_gradient: bool = True
    kept: bool = False

    def __post_init__(self) -> None:
        if (self.output_gradient is None) == (self.labels is None):
            raise ValueError("StageBackward takes either output_gradient or labels")

    def cost(self, learner: Learner) -> Cost:
        return stage_backward_cost(self.stage, len(self.x), self._wants_input(), self.kept)

    def _wants_input(self) -> bool:
        return self.input_gradient and self.x.is_floating_point()

    def run(self, learner: Learner) -> StageGradient:
        tape = learner.tapes.take(self.stage, self.parameters, self.x, self._wants_input())
        try:
            return self._backward(tape)
        finally:
            learner.tapes.done(tape)

    def _backward(self, tape: Tape) -> StageGradient:
        scratch, loss = tape.bench.scratch, None
        scratch.gradient.zero_()
        if self.labels is not None:
            loss = tasks.mean_loss(self.stage.task, tape.output, self.labels.to(scratch.device))
            loss.backward()  # type: ignore[no-untyped-call]
        elif self.output_gradient is not None:
            # The bits of backward(gradient), whose first call in a process imports SymPy for half a second.
            pulled = (tape.output * self.output_gradient.to(scratch.device)).sum()
            pulled.backward()  # type: ignore[no-untyped-call]
        x = tape.inputs.grad
        return StageGradient(
            scratch.gradient_vector(self.parameters),
            x.to("cpu").contiguous() if x is not None and self._wants_input() else None,
            None if loss is None else float(loss.detach()),
        )


@dataclass(frozen=True, eq=False)
class Call(Work):
    """The escape from work items: fn(*args), at a stated cost.

    The arguments are what they are now: lists, dicts, sets and arrays are copied; tensors and vectors
    are values. A function that closes over names that change later is refused with ConfigError.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    stated_cost: Cost = field(default_factory=Cost)

    def __post_init__(self) -> None:
        if getattr(self.fn, "__closure__", None):
            found = getattr(self.fn, "__qualname__", repr(self.fn))
            raise ConfigError("Call.fn", found, "it closes over names that may change; pass them as args")
        object.__setattr__(self, "args", tuple(map(_frozen, self.args)))

    def cost(self, learner: Learner) -> Cost:
        return self.stated_cost

    def run(self, learner: Learner) -> Any:
        return self.fn(*self.args)


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple | set) and type(value) in (list, tuple, set):
        return type(value)(map(_frozen, value))
    if type(value) is dict:
        return {key: _frozen(item) for key, item in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def _stream_key(kind: str, data: LocalData, workload: Workload, *more: Hashable) -> Hashable | None:
    """Equal for nodes whose mini-batches can be gathered at once; None for streams of another class."""
    kinds = (LocalData, WeightedData)
    if type(data) not in kinds or not data.dataset.x_train.dtype.is_floating_point:
        return None
    return (kind, data.dataset, workload.batch_size, *more)
