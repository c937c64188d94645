"""What one example costs in each block of a model, counted by running the block once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_EXAMPLES = 2


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that torch's own registry knows, as FlopCounterMode does. That one brings
    torch's compiler into the process with its first use: one to three seconds of a run's start."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        output = func(*args, **kwargs)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=output)
        return output


@dataclass(frozen=True)
class BlockCount:
    """One block, per example: float32 operations (a multiply-add counts two) of matrix products and
    convolutions, and bytes.

    forward_flops, backward_flops; first_backward_flops: backward without the gradient at the input.
    saved_bytes: what the forward pass keeps for the backward pass, apart from parameters and from what
    an earlier block keeps already.
    output_bytes, output_shape: of one example's output.
    """

    forward_flops: float
    backward_flops: float
    first_backward_flops: float
    saved_bytes: int
    output_bytes: int
    output_shape: tuple[int, ...]


def count_blocks(module: nn.Sequential, example: Tensor) -> tuple[BlockCount, ...]:
    """Count each block of a module, which is used up: its gradients and buffers change.

    example: (1, ...) an input of the first block.
    """
    counts, x = [], torch.cat([example] * _EXAMPLES)
    kept: dict[int, Tensor] = {}
    module.train()
    for block in module:
        count, x = _count(block, x, kept)
        counts.append(count)
    return tuple(counts)


def _count(block: nn.Module, x: Tensor, kept: dict[int, Tensor]) -> tuple[BlockCount, Tensor]:
    before = set(kept)
    forward, first_backward, output = _passes(block, x, kept)
    saved = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in before)
    backward = first_backward
    if x.is_floating_point():
        _, backward, _ = _passes(block, x.detach().requires_grad_(), {})
    count = BlockCount(
        forward_flops=forward / _EXAMPLES,
        backward_flops=backward / _EXAMPLES,
        first_backward_flops=first_backward / _EXAMPLES,
        saved_bytes=saved // _EXAMPLES,
        output_bytes=output.nbytes // _EXAMPLES,
        output_shape=tuple(output.shape[1:]),
    )
    return count, output.detach()


def _passes(block: nn.Module, x: Tensor, kept: dict[int, Tensor]) -> tuple[float, float, Tensor]:
    """Operations forward and backward, and the output.

    kept: gains what is saved between the passes, by address; a tensor of two blocks counts in the first.
    """
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept.setdefault(place, tensor)
        return tensor

    with ExitStack() as stack:
        lstm = stack.enter_context(_lstm_flops(block, x.requires_grad))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        with _Flops() as forward:
            output: Tensor = block(x)
    with _Flops() as backward:
        if output.requires_grad:
            output.sum().backward()  # type: ignore[no-untyped-call]
    return (
        forward.total + lstm["forward"],
        backward.total + lstm["backward"],
        output,
    )


@contextmanager
def _lstm_flops(block: nn.Module, input_gradient: bool) -> Iterator[dict[str, float]]:
    """Count LSTMs by hand: the counter sees nothing of their fused kernels."""
    flops = {"forward": 0.0, "backward": 0.0}

    def count(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        assert isinstance(module, nn.LSTM)
        tokens, inner = args[0].shape[0] * args[0].shape[1], args[0].requires_grad or input_gradient
        into = 2.0 * tokens * 4 * module.hidden_size * module.input_size
        across = 2.0 * tokens * 4 * module.hidden_size * module.hidden_size
        flops["forward"] += into + across
        flops["backward"] += into * (2 if inner else 1) + 2 * across

    hooks = [m.register_forward_hook(count) for m in block.modules() if isinstance(m, nn.LSTM)]
    try:
        yield flops
    finally:
        for hook in hooks:
            hook.remove()
