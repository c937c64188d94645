"""What each kind of work costs, before it is done.

Costs count, per example, the operations of matrix products and convolutions, forward and backward,
and per step these bytes to and from memory: the parameters read by each pass, the gradient written
once, and what the forward pass keeps for the backward pass written, read, and followed by a gradient of
its size; an optimiser step reads and writes the parameters and its state and reads the gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgefl.learning.cost import Cost
from edgefl.learning.operators import Batches, Calls

if TYPE_CHECKING:
    from edgefl.learning.model import Model


def num_examples_in(batches: Batches) -> int:
    """Of all of them."""
    return sum(size * count for size, count in batches)


def batch_sizes(size: int, batch_size: int, steps: range) -> Batches:
    """The sizes of the batches in these steps, full ones and last ones of epochs, and how many of each."""
    if not size:
        return ()
    per_epoch, last = -(-size // batch_size), size % batch_size
    num_small = 0 if not last else steps.stop // per_epoch - steps.start // per_epoch
    batches = ((batch_size, len(steps) - num_small), (last, num_small))
    return tuple((size, count) for size, count in batches if size and count)


def stage_forward_cost(stage: Model, num_examples: int) -> Cost:
    """What StageForward costs; whether its values are kept changes nothing."""
    return forward_cost(stage, num_examples)


def stage_backward_cost(stage: Model, num_examples: int, input_gradient: bool, kept: bool) -> Cost:
    """What StageBackward costs; kept: without the forward pass, which was charged when it was made."""
    cost = gradient_cost(stage, num_examples, num_examples, input_gradient)
    batches = ((num_examples, 1),)
    if not kept:
        return replace(cost, calls=Calls(stage, "stage", batches, input_gradient))
    forward = forward_cost(stage, num_examples)
    return replace(
        cost,
        flops=cost.flops - forward.flops,
        traffic_bytes=cost.traffic_bytes - forward.traffic_bytes,
        model=None,
        batch_size=None,
        calls=Calls(stage, "backward", batches, input_gradient),
    )


def forward_cost(model: Model, num_examples: int, at_once: int | None = None) -> Cost:
    counts = model.counts
    held = min(num_examples, at_once or num_examples)
    full, last = divmod(num_examples, held) if held else (0, 0)
    return Cost(
        flops=num_examples * counts.forward_flops,
        traffic_bytes=counts.parameter_bytes + num_examples * counts.saved_bytes,
        num_steps=1,
        memory_bytes=counts.parameter_bytes + held * counts.saved_bytes,
        calls=Calls(model, "forward", tuple((n, k) for n, k in ((held, full), (last, 1)) if n and k)),
    )


def local_cost(model: Model, batch_size: int, batches: Batches, state_bytes: int) -> Cost:
    """What local training costs over these batches; state_bytes: of the optimiser, as large as the model."""
    counts, size = model.counts, model.counts.parameter_bytes
    num_examples, num_steps = num_examples_in(batches), sum(count for _, count in batches)
    return Cost(
        flops=num_examples * (counts.forward_flops + counts.backward_flops),
        traffic_bytes=num_steps * (6 * size + 2 * state_bytes) + num_examples * 3 * counts.saved_bytes,
        num_steps=num_steps,
        memory_bytes=2 * size + state_bytes + batch_size * 2 * counts.saved_bytes,
        model=model.label,
        batch_size=batch_size,
        calls=Calls(model, "step", batches, state_bytes=state_bytes),
    )


def gradient_cost(model: Model, num_examples: int, batch_size: int, input_gradient: bool = False) -> Cost:
    """What one gradient over `num_examples` costs; batch_size: what a measured step time goes by."""
    counts = model.counts
    flops = counts.forward_flops + counts.backward_flops
    return Cost(
        flops=num_examples * (flops + (counts.input_gradient_flops if input_gradient else 0)),
        traffic_bytes=3 * counts.parameter_bytes + num_examples * 3 * counts.saved_bytes,
        num_steps=1,
        memory_bytes=2 * counts.parameter_bytes + num_examples * 2 * counts.saved_bytes,
        model=model.label,
        batch_size=batch_size,
        calls=Calls(model, "gradient", ((num_examples, 1),), input_gradient),
    )
