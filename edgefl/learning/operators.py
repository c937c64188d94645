"""The operators that a block calls in both its passes, and how their sizes grow with the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from edgefl.data import Task
from edgefl.devices.kernels import Kernels
from edgefl.learning import tasks

_BATCHES = (2, 4)
Call = tuple[str, tuple[float, ...]]
"""A kind of operator (devices.kernels.KINDS) and its dimensions."""


@dataclass(frozen=True)
class Operator:
    """One call: at batch size B its i-th dimension is base[i] + slope[i] B."""

    kind: str
    base: tuple[float, ...]
    slope: tuple[float, ...]

    def seconds(self, batch_size: float, kernels: Kernels) -> float:
        """What it takes on a device with these kernels."""
        dims = tuple(b + s * batch_size for b, s in zip(self.base, self.slope, strict=True))
        return kernels.seconds(self.kind, dims)


@dataclass(frozen=True)
class Passes:
    """One block's operators. first_backward: without the gradient at the input. nodes: operators that
    automatic differentiation follows; first_nodes: where it does not follow the input."""

    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    first_backward: tuple[Operator, ...]
    nodes: int
    first_nodes: int


def trace_blocks(blocks: Iterable[nn.Module], example: Tensor) -> tuple[Passes, ...]:
    """The operators of each block in turn. The blocks' gradients and buffers change.

    example: (1, ...) an input of the first block.
    """
    xs = [torch.cat([example] * size) for size in _BATCHES]
    if example.dim() == 4:  # as training lays images out
        xs = [torch.empty(x.shape, memory_format=torch.channels_last).copy_(x) for x in xs]
    traced = []
    for block in blocks:
        runs = [_run(block, x, False) for x in xs]
        inner = [_run(block, x, True) for x in xs] if xs[0].is_floating_point() else runs
        traced.append(
            Passes(
                forward=_fitted([run.forward for run in runs]),
                backward=_fitted([run.backward for run in inner]),
                first_backward=_fitted([run.backward for run in runs]),
                nodes=inner[0].nodes,
                first_nodes=runs[0].nodes,
            )
        )
        xs = [run.output for run in runs]
    return tuple(traced)


class Loss(nn.Module):
    """A task's loss at labels of zeros, as a last block."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def forward(self, x: Tensor) -> Tensor:
        if self.task == "regression":
            return tasks.mean_loss(self.task, x, torch.zeros_like(x))
        return tasks.mean_loss(self.task, x, torch.zeros(x.shape[:-1], dtype=torch.int64))


@dataclass(frozen=True)
class _Run:
    forward: list[Call]
    backward: list[Call]
    nodes: int
    output: Tensor


def _run(block: nn.Module, x: Tensor, input_gradient: bool) -> _Run:
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)  # as in training: gradients are added to what is there
    x = x.detach().requires_grad_(input_gradient)
    with _Recorder() as forward:
        output: Tensor = block(x)
    nodes = _num_nodes(output)
    with _Recorder() as backward:
        if output.requires_grad:
            output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]
    return _Run(forward.calls, backward.calls, nodes, output.detach())


def _num_nodes(output: Tensor) -> int:
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [inner for inner, _ in node.next_functions]
    return len(seen)


def _fitted(runs: list[list[Call]]) -> tuple[Operator, ...]:
    """One operator per call, from the same calls at two batch sizes."""
    (few, many), (small, large) = runs, _BATCHES
    operators = []
    for (kind, at_small), (_, at_large) in zip(few, many, strict=True):
        slope = tuple((b - a) / (large - small) for a, b in zip(at_small, at_large, strict=True))
        base = tuple(a - s * small for a, s in zip(at_small, slope, strict=True))
        operators.append(Operator(kind, base, slope))
    return tuple(operators)


Batches = tuple[tuple[int, int], ...]
"""Batch sizes, and how many steps of each."""


_CALLS = {
    "step": (1.0, (1, 3)),
    "gradient": (1.0, (1, 2, 2)),
    "stage": (0.5, (2, 1, 2)),
    "forward": (0.1, (2,)),
    "backward": (0.4, (1, 2)),
}
"""Of each kind of call: its part of a step's fixed time (as measured for small models), and how many values
per parameter each pass over the flat vectors reads and writes."""


class StepTimes:
    """What the passes of a model or stage take on devices whose kernels are measured.

    passes: of its blocks; loss: of the task's loss, None for a stage that ends in a cut. num_parameters: P.
    num_inputs: values of one example.
    """

    def __init__(
        self, passes: Sequence[Passes], loss: Passes | None, num_parameters: int, num_inputs: int
    ) -> None:
        self._passes, self._loss, self._bytes = tuple(passes), loss, 4.0 * num_parameters
        self._num_inputs = num_inputs
        self._known: dict[tuple[int, int, str, bool], tuple[Kernels, float]] = {}

    def seconds(self, kernels: Kernels, batch_size: int, kind: str, input_gradient: bool = False) -> float:
        """One call. kind: "step" (passes, loss and optimiser), "gradient" (the same without the
        optimiser), "stage" (both passes of a stage), "forward", or "backward" (after a forward pass that was
        kept)."""
        key = (id(kernels), batch_size, kind, input_gradient)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (kernels, self._seconds(kernels, batch_size, kind, input_gradient))
        return known[1]

    def _seconds(self, kernels: Kernels, batch_size: int, kind: str, input_gradient: bool) -> float:
        total = 0.0
        if kind != "backward":
            total += self._forward_s(kernels, batch_size)
        if kind != "forward":
            total += self._backward_s(kernels, batch_size, input_gradient)
        if kind in ("step", "gradient"):
            total += kernels.seconds("gather", (batch_size, self._num_inputs))
            total += kernels.seconds("gather", (batch_size, 1))
        share, copies = _CALLS[kind]
        total += sum(kernels.seconds("elementwise", (n * self._bytes,)) for n in copies)
        return total + share * kernels.step_s

    def _forward_s(self, kernels: Kernels, batch_size: int) -> float:
        every = [op for block in self._passes for op in block.forward]
        every += self._loss.forward if self._loss is not None else ()
        nodes = sum(block.nodes for block in self._passes)
        return sum(op.seconds(batch_size, kernels) for op in every) + kernels.node_s / 2 * nodes

    def _backward_s(self, kernels: Kernels, batch_size: int, input_gradient: bool) -> float:
        first, *rest = self._passes
        every = list(first.backward if input_gradient else first.first_backward)
        every += [op for block in rest for op in block.backward]
        nodes = (first.nodes if input_gradient else first.first_nodes) + sum(block.nodes for block in rest)
        if self._loss is not None:
            every += self._loss.backward
            nodes += self._loss.nodes
        return sum(op.seconds(batch_size, kernels) for op in every) + kernels.node_s / 2 * nodes


class Timed(Protocol):
    """A model or a stage of one."""

    @property
    def step_times(self) -> StepTimes: ...


@dataclass(frozen=True)
class Calls:
    """Calls of one kind (StepTimes.seconds): batch sizes, and how many calls of each.

    state_bytes: of the optimiser's state, which each call reads and writes.
    """

    model: Timed
    kind: str
    batches: Batches
    input_gradient: bool = False
    state_bytes: int = 0

    def seconds(self, kernels: Kernels) -> float:
        """All of them together. Constant work once each batch size has been asked for."""
        times = self.model.step_times
        state_s = kernels.seconds("elementwise", (2.0 * self.state_bytes,)) if self.state_bytes else 0.0
        return sum(
            n * (times.seconds(kernels, size, self.kind, self.input_gradient) + state_s)
            for size, n in self.batches
        )


class _Recorder(TorchDispatchMode):
    """Writes down what is dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        self.calls += _calls(str(function.overloadpacket).removeprefix("aten."), args, output)
        return output


def _calls(name: str, args: tuple[Any, ...], output: Any) -> list[Call]:
    """What one dispatched operator counts as."""
    if name in _FREE:
        return []
    if name in _VIEWS:
        return [("view", ())]
    known = _KNOWN.get(name)
    if known is not None:
        return known(args, output)
    return [("strided" if _layouts_differ(args) else "elementwise", (_num_bytes(args, output),))]


def _layouts_differ(args: tuple[Any, ...]) -> bool:
    """Whether images come in several layouts, or in one that is neither of the two usual ones."""
    images = [x for x in args if isinstance(x, Tensor) and x.dim() == 4]
    last = [x.is_contiguous(memory_format=torch.channels_last) for x in images]
    return (any(last) and not all(last)) or not all(
        is_last or x.is_contiguous() for is_last, x in zip(last, images, strict=True)
    )


def _num_bytes(args: Any, output: Any) -> float:
    """Bytes of all tensors in and out."""
    if isinstance(args, Tensor):
        return args.numel() * args.element_size() + (0 if output is None else _num_bytes(output, None))
    inner = sum(_num_bytes(one, None) for one in args) if isinstance(args, list | tuple) else 0.0
    return max(inner + (0 if output is None else _num_bytes(output, None)), 4.0)


def _values(kind: str, which: int = 0) -> Callable[[Any, Any], list[Call]]:
    return lambda args, output: [(kind, (args[which].numel(),))]


def _rows(kind: str, which: int = 0) -> Callable[[Any, Any], list[Call]]:
    def call(args: Any, output: Any) -> list[Call]:
        columns = args[which].shape[-1]
        return [(kind, (args[which].numel() / columns, columns))]

    return call


def _addmm(args: Any, output: Any) -> list[Call]:
    return [("matmul", (output.shape[0], output.shape[1], args[-1].shape[0]))]


def _bmm(args: Any, output: Any) -> list[Call]:
    return [("bmm", (*output.shape, args[0].shape[-1]))]


def _conv_dims(weight: Tensor, pixels: float, stride: Sequence[int]) -> tuple[float, ...]:
    c_out, c_in, height, width = weight.shape
    return c_in, c_out, math.sqrt(height * width), pixels, max(stride)


def _conv(args: Any, output: Any) -> list[Call]:
    return [("conv", _conv_dims(args[1], output.numel() / output.shape[1], args[3]))]


def _conv_backward(args: Any, output: Any) -> list[Call]:
    gradient, _, weight, _, stride = args[:5]
    dims = _conv_dims(weight, gradient.numel() / gradient.shape[1], stride)
    wants_input, wants_weight, _ = args[-1]
    return [("conv_input", dims)] * wants_input + [("conv_weight", dims)] * wants_weight


def _image(kind: str, which: int) -> Callable[[Any, Any], list[Call]]:
    def call(args: Any, output: Any) -> list[Call]:
        x = args[which]
        return [(kind, (x.shape[1], x.numel() / x.shape[1]))]

    return call


def _sum(args: Any, output: Any) -> list[Call]:
    if args[0].dim() == 4:
        return [("strided", (_num_bytes(args, output),))]
    kept = max(output.numel(), 1)
    return [("sum", (args[0].numel() / kept, kept))]


def _gather(args: Any, output: Any) -> list[Call]:
    return [("gather", (output.numel() / output.shape[-1], output.shape[-1]))]


def _lstm(args: Any, output: Any) -> list[Call]:
    x, w_ih, w_hh = args[:3]
    return [("lstm", (x.shape[0], x.shape[1], w_ih.shape[-1], w_hh.shape[-1]))]


def _lstm_backward(args: Any, output: Any) -> list[Call]:
    return [("lstm_backward", _lstm(args, output)[0][1])]


_FREE = frozenset({"detach"})
"""Bookkeeping of the tracing itself, and of nothing."""
_VIEWS = frozenset(
    {"t", "view", "_unsafe_view", "expand", "transpose", "permute", "unsqueeze", "squeeze", "select", "slice",
     "unbind", "as_strided", "alias", "split", "_reshape_alias"}
)  # fmt: skip
_KNOWN: Mapping[str, Callable[[Any, Any], list[Call]]] = {
    "addmm": _addmm,
    "mm": _addmm,
    "bmm": _bmm,
    "convolution": _conv,
    "convolution_backward": _conv_backward,
    "max_pool2d_with_indices": _image("pool", 0),
    "max_pool2d_with_indices_backward": _image("pool_backward", 1),
    "native_group_norm": _image("group_norm", 0),
    "native_batch_norm": _image("group_norm", 0),
    "native_group_norm_backward": _image("group_norm_backward", 1),
    "native_batch_norm_backward": _image("group_norm_backward", 1),
    "native_layer_norm": _rows("layer_norm"),
    "native_layer_norm_backward": _rows("layer_norm_backward"),
    "_softmax": _rows("softmax"),
    "_log_softmax": _rows("softmax"),
    "_softmax_backward_data": _rows("softmax"),
    "_log_softmax_backward_data": _rows("softmax"),
    "gelu": _values("transcendental"),
    "gelu_backward": _values("transcendental"),
    "sum": _sum,
    "mean": _sum,
    "embedding": _gather,
    "index_select": _gather,
    "embedding_dense_backward": _rows("scatter"),
    "mkldnn_rnn_layer": _lstm,
    "mkldnn_rnn_layer_backward": _lstm_backward,
}
