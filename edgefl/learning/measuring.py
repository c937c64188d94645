"""Timing whole training steps on this machine: what the profiler fits its kernels to, and models by name."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from edgefl.data import Dataset, LocalData
from edgefl.devices.kernels import Kernels
from edgefl.devices.profiler.timing import Sample, measure
from edgefl.learning.learner import Learner
from edgefl.learning.model import Model
from edgefl.learning.models import ModelConfig, Problem, build_model
from edgefl.learning.work import LocalSGD, StageBackward
from edgefl.learning.workload import TrainConfig, Workload

STEPS_AT_ONCE = 2
_EXAMPLES = 512
MOST_SCALE = 1.1
_CONVOLUTIONS = ("conv", "conv_weight", "conv_input")


def made_data(problem: Problem, num_examples: int = _EXAMPLES) -> LocalData:
    """Examples of chance, of the problem's shapes: what they hold changes no step's time."""
    rng = torch.Generator().manual_seed(0)
    shape = (num_examples, *problem.input_shape)
    if problem.task == "language":
        x = torch.randint(problem.num_outputs, shape, generator=rng)
        y = torch.randint(problem.num_outputs, shape, generator=rng)
    else:
        x = torch.randn(shape, generator=rng)
        y = torch.randint(max(problem.num_outputs, 1), (num_examples,), generator=rng)
        if problem.task == "regression":
            y = torch.randn(num_examples, problem.num_outputs, generator=rng)
    made = Dataset("made", problem.task, x, y, x[:1], y[:1], problem.num_outputs)
    return LocalData(made, np.arange(num_examples), 0, 0)


def problem_of(model: Model) -> Problem:
    """The problem that a whole model solves."""
    return Problem(model.task, model.input_shape, model.num_outputs)


def step_sample(model: Model, batch_size: int, budget_s: float = 0.2) -> Sample:
    """Seconds of one step of local training with plain SGD."""
    data = made_data(problem_of(model), max(_EXAMPLES, batch_size))
    learner = Learner(model, TrainConfig(batch_size=batch_size))
    steps = min(STEPS_AT_ONCE, len(data) // batch_size)
    work = LocalSGD(model.init(), data, 0, Workload(batch_size=batch_size, steps=steps))
    sample = measure(lambda: work.run(learner), budget_s)
    return Sample(sample.seconds / steps, sample.quiet_s / steps, sample.spread, sample.repeats)


def stage_sample(stage: Model, batch_size: int, budget_s: float = 0.2) -> Sample:
    """Seconds of both passes of a stage: with the gradient at its input unless it is the model's first,
    with the loss where it is the last."""
    assert stage.whole is not None
    rng = torch.Generator().manual_seed(0)
    learner = Learner(stage.whole, TrainConfig(batch_size=batch_size))
    batch = made_data(problem_of(stage.whole), batch_size).batch(0, batch_size)
    first, last = stage.first == 0, stage.first + len(stage.blocks) == len(stage.whole.blocks)
    x = batch.x if first else torch.randn((batch_size, *stage.input_shape), generator=rng)
    parameters = stage.init()
    output: dict[str, Any] = {"labels": batch.y}
    if not last:
        shape = stage.block_counts[-1].output_shape
        output = {"output_gradient": torch.randn((batch_size, *shape), generator=rng)}
    work = StageBackward(stage, parameters, x, input_gradient=not first, **output)
    return measure(lambda: work.run(learner), budget_s)


def fitted_kernels(times: dict[str, tuple[tuple[float, ...], ...]], budget_s: float = 0.3) -> Kernels:
    """Kernels from the operators' times, with what steps of a few reference networks take beyond their sum:
    a fixed time per step and per followed operator, per convolution, and a factor on all."""
    plain = Kernels(step_s=0.0, node_s=0.0, times=times)
    shallow, deep = (_dense((8,) * depth, 8) for depth in (1, 8))
    over = [_beyond(model, 4, plain, budget_s) for model in (shallow, deep)]
    nodes = [_num_nodes(model) for model in (shallow, deep)]
    node_s = max(0.0, (over[1] - over[0]) / (nodes[1] - nodes[0]))
    step_s = max(0.0, over[0] - node_s * nodes[0])
    fitted = plain.model_copy(update={"step_s": step_s, "node_s": node_s})
    chain = _images((8,) * 6, 8)
    extra_s = max(0.0, _beyond(chain, 4, fitted, budget_s) / _num_convolutions(chain))
    fitted = fitted.model_copy(update={"context_s": dict.fromkeys(_CONVOLUTIONS, extra_s)})
    references = ((_dense((128, 128), 256), 64), (_images((16, 24, 24), 16), 32), (_images((32, 32), 16), 64))
    factors = [
        _quiet_step_s(model, batch, budget_s) / model.step_times.seconds(fitted, batch, "step")
        for model, batch in references
    ]
    # Beyond that it was another program's load: on a quiet machine the factor measured about 1.1.
    scale = min(max(statistics.median(factors), 1.0), MOST_SCALE)
    return fitted.model_copy(update={"scale": scale})


def step_times(model: Model, batch_sizes: Sequence[int], budget_s: float) -> dict[int, Sample]:
    """Measured step times by batch size, for a profile's step_times_s at model.label."""
    each = budget_s / max(len(batch_sizes), 1)
    return {size: step_sample(model, size, each) for size in batch_sizes}


def block_times(model: Model, batch_size: int, budget_s: float) -> dict[str, float]:
    """Seconds of both passes of each block, alone."""
    count = len(model.blocks)
    if count == 1:
        return {model.blocks[0]: step_sample(model, batch_size, budget_s).seconds}
    stages = ((name, model.stage(i, i + 1)) for i, name in enumerate(model.blocks))
    return {name: stage_sample(stage, batch_size, budget_s / count).seconds for name, stage in stages}


def _dense(hidden: tuple[int, ...], inputs: int) -> Model:
    config = ModelConfig(name="mlp", hidden=hidden)
    return build_model(config, Problem("classification", (inputs,), 4), 0)


def _images(channels: tuple[int, ...], width: int) -> Model:
    config = ModelConfig(name="vgg", channels=channels, pooled=(), hidden=8)
    return build_model(config, Problem("classification", (1, width, width), 4), 0)


def _beyond(model: Model, batch_size: int, kernels: Kernels, budget_s: float) -> float:
    """Seconds of a step beyond what the kernels say."""
    predicted_s = model.step_times.seconds(kernels, batch_size, "step")
    return _quiet_step_s(model, batch_size, budget_s) - predicted_s


def _quiet_step_s(model: Model, batch_size: int, budget_s: float) -> float:
    """The better of two samples: what other programs do only ever adds."""
    return min(step_sample(model, batch_size, budget_s / 2).quiet_s for _ in range(2))


def _num_nodes(model: Model) -> float:
    """Followed operators of a step, as StepTimes counts them: half for each pass."""
    first, *rest = model.block_passes
    forward = first.nodes + sum(block.nodes for block in rest)
    return (forward + first.first_nodes + sum(block.nodes for block in rest)) / 2


def _num_convolutions(model: Model) -> int:
    first, *rest = model.block_passes
    calls = [*first.forward, *first.first_backward]
    calls += [op for block in rest for op in (*block.forward, *block.backward)]
    return sum(op.kind in _CONVOLUTIONS for op in calls)
