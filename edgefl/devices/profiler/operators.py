"""The operators of training steps at several sizes, to be timed one by one.

As in training, where each operator reads what the one before has written and its output stays until the
backward pass, a case goes round several inputs and keeps the latest outputs: small ones stay in the caches,
large ones do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_MATMULS = (
    (1, 1, 1), (4, 64, 64), (16, 10, 64), (16, 64, 64), (64, 10, 16), (64, 64, 16), (16, 512, 784),
    (64, 128, 784), (128, 784, 64), (256, 256, 256), (640, 64, 128), (1280, 256, 64), (64, 64, 2048),
    (512, 512, 512), (4, 128, 2048),
)  # fmt: skip
"""Rows, columns and inner size: batches of activations, and gradients of weights."""
_BMMS = ((1, 1, 1, 1), (16, 20, 20, 16), (64, 20, 16, 20), (256, 20, 20, 16), (256, 16, 64, 64))
_CONVS = (
    (4, 8, 3, 4, 4, 1), (1, 8, 5, 8, 4, 1), (1, 8, 5, 8, 32, 1), (1, 8, 5, 28, 4, 1), (1, 8, 5, 28, 64, 1),
    (1, 16, 3, 8, 16, 1), (1, 16, 3, 8, 64, 1), (1, 16, 3, 28, 8, 1), (1, 32, 3, 28, 32, 1),
    (3, 16, 3, 32, 8, 1), (3, 32, 3, 32, 4, 1), (3, 32, 3, 32, 64, 1), (8, 8, 3, 8, 8, 1),
    (8, 16, 5, 4, 16, 1), (8, 16, 5, 14, 8, 1), (8, 16, 5, 14, 64, 1), (16, 16, 3, 8, 4, 1),
    (16, 16, 3, 8, 32, 1), (16, 16, 3, 32, 16, 1), (16, 32, 3, 4, 16, 1), (16, 32, 3, 14, 8, 1),
    (16, 32, 3, 14, 64, 1), (16, 32, 1, 8, 8, 2), (16, 32, 1, 32, 32, 2), (16, 32, 3, 8, 8, 2),
    (16, 32, 3, 32, 32, 2), (16, 32, 1, 8, 4, 1), (16, 32, 1, 16, 32, 1), (32, 32, 3, 4, 4, 1),
    (32, 32, 3, 8, 16, 1), (32, 32, 3, 32, 16, 1), (32, 64, 3, 4, 32, 1), (32, 64, 1, 8, 32, 1),
    (64, 64, 3, 8, 4, 1), (64, 64, 3, 14, 8, 1), (64, 64, 3, 16, 32, 1), (64, 128, 3, 8, 4, 1),
    (64, 128, 3, 8, 32, 1), (32, 64, 1, 16, 64, 2), (32, 64, 3, 16, 64, 2), (16, 16, 3, 32, 64, 1),
    (32, 32, 3, 32, 64, 1),
)  # fmt: skip
"""Channels in and out, kernel, width of the image, images, stride."""
_LSTMS = (
    (1, 1, 1, 1),
    (20, 4, 8, 32),
    (20, 16, 8, 128),
    (20, 16, 128, 128),
    (80, 4, 64, 128),
    (20, 64, 64, 64),
)
_ROWS = ((1, 1), (16, 10), (64, 64), (320, 60), (1280, 64), (4096, 256))
_SIZES = (1, 1_000, 16_000, 128_000, 1_000_000)
_NORMS = (
    (1, 8, 1), (4, 16, 8), (64, 16, 8), (4, 32, 4), (64, 32, 4), (16, 64, 8), (16, 16, 32), (16, 32, 16),
    (64, 16, 32),
)  # fmt: skip
"""Images, channels, width."""
_POOLS = ((1, 8, 2), (4, 8, 8), (64, 8, 8), (16, 8, 28), (64, 8, 28), (64, 16, 4), (16, 32, 16), (16, 64, 32))
"""Images, channels, width."""


ROUND = 8
"""Inputs that a case goes round, at most: large ones are fewer, for devices with little memory."""
_MOST_BYTES = 3e7


@dataclass(frozen=True)
class Case:
    """One call to time. kind, dims: as devices.kernels.KINDS has them; flops: of one call."""

    kind: str
    dims: tuple[float, ...]
    call: Callable[[], object]
    flops: float = 0.0


def cases(quick: bool = False) -> Iterator[Case]:
    """All operators at all sizes; quick: at every other size. Inputs are made as each case comes."""
    for group in (_plain, _rowwise, _matmuls, _convolutions, _pools, _norms, _lstms):
        yield from group(2 if quick else 1)


def _round(function: Callable[..., object], make: Callable[[], tuple[Any, ...]]) -> Callable[[], object]:
    """A call of the function on the next of several inputs, the latest outputs kept. The inputs are made when
    it is called first."""
    return _going_round(function, make).__next__


def _going_round(function: Callable[..., object], make: Callable[[], tuple[Any, ...]]) -> Iterator[object]:
    first = make()
    size = sum(x.nbytes for x in first if isinstance(x, Tensor))
    count = max(2, min(ROUND, int(_MOST_BYTES // max(size, 1))))
    inputs = [first, *(make() for _ in range(count - 1))]
    kept: deque[object] = deque(maxlen=count)
    while True:
        for one in inputs:
            kept.append(function(*one))
            yield None


def _ones(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.ones(shape) for shape in shapes)


def _some(sizes: tuple[Any, ...], every: int) -> tuple[Any, ...]:
    """Every so many of them, the first and the last included."""
    return tuple(dict.fromkeys((*sizes[::every], sizes[-1])))


def _plain(every: int) -> Iterator[Case]:
    yield Case("view", (), _round(torch.t, lambda: (torch.ones(8, 8),)))
    for n in _some(_SIZES, every):
        yield Case("elementwise", (12.0 * n,), _round(torch.add, partial(_ones, (n,), (n,))))
        if n > 64:
            yield _strided(n // 64)
    for n in _some(_SIZES, every):
        yield Case("transcendental", (n,), _round(functional.gelu, partial(_ones, (n,))))


def _strided(images: int) -> Case:
    """A copy from one layout of images to the other."""

    def make() -> tuple[Any, ...]:
        x = torch.ones(images, 16, 2, 2)
        return x, x.to(memory_format=torch.channels_last)

    return Case("strided", (8.0 * 64 * images,), _round(torch.add, make))


def _rowwise(every: int) -> Iterator[Case]:
    scatter = torch.ops.aten.embedding_dense_backward
    for rows, columns in _some(_ROWS, every):
        dims, places = (rows, columns), torch.arange(rows) % 50

        def matrix(*rest: Any, dims: tuple[int, int] = dims) -> Callable[[], tuple[Any, ...]]:
            return lambda: (torch.zeros(dims), *rest)

        yield Case("softmax", dims, _round(torch.softmax, matrix(-1)))
        yield Case("sum", dims, _round(torch.sum, matrix(0)))
        table = torch.zeros(50, columns)
        yield Case("gather", dims, _round(partial(torch.embedding, table, places), tuple))
        yield Case("scatter", dims, _round(scatter, matrix(places, 50, -1, False)))
        weight, shape = torch.ones(columns), [columns]
        yield Case("layer_norm", dims, _round(torch.native_layer_norm, matrix(shape, weight, weight, 1e-5)))
        yield _layer_norm_backward(rows, columns)


def _layer_norm_backward(rows: int, columns: int) -> Case:
    weight, shape = torch.ones(columns), [columns]

    def make() -> tuple[Any, ...]:
        x = torch.rand(rows, columns)
        _, mean, scale = torch.native_layer_norm(x, shape, weight, weight, 1e-5)
        return x.clone(), x, shape, mean, scale, weight, weight, [True, True, True]

    call = _round(torch.ops.aten.native_layer_norm_backward, make)
    return Case("layer_norm_backward", (rows, columns), call)


def _matmuls(every: int) -> Iterator[Case]:
    for m, n, k in _some(_MATMULS, every):
        bias = torch.ones(n)

        def make(m: int = m, n: int = n, k: int = k, bias: Tensor = bias) -> tuple[Any, ...]:
            return bias, torch.ones(m, k), torch.ones(n, k).t()

        yield Case("matmul", (m, n, k), _round(torch.addmm, make), 2.0 * m * n * k)
    for b, m, n, k in _some(_BMMS, every):

        def pair(b: int = b, m: int = m, n: int = n, k: int = k) -> tuple[Any, ...]:
            return torch.ones(b, m, k), torch.ones(b, k, n)

        yield Case("bmm", (b, m, n, k), _round(torch.bmm, pair), 2.0 * b * m * n * k)


def _convolutions(every: int) -> Iterator[Case]:
    for size in _some(_CONVS, every):
        yield from _convolution(*size)


def _convolution(c_in: int, c_out: int, kernel: int, width: int, images: int, stride: int) -> Iterator[Case]:
    weight, bias, pad = torch.ones(c_out, c_in, kernel, kernel), torch.ones(c_out), kernel // 2
    layout = ([c_out], [stride, stride], [pad, pad], [1, 1], False, [0, 0], 1)
    after = width // stride
    dims = (c_in, c_out, kernel, images * after * after, stride)
    flops = 2.0 * c_in * c_out * kernel**2 * dims[3]

    def image(channels: int, width: int) -> Tensor:
        return torch.ones(images, channels, width, width).to(memory_format=torch.channels_last)

    def backward(*wanted: bool) -> Callable[[], object]:
        def make() -> tuple[Any, ...]:
            return image(c_out, after), image(c_in, width), weight, *layout, list(wanted)

        return _round(torch.ops.aten.convolution_backward, make)

    forward = _round(functional.conv2d, lambda: (image(c_in, width), weight, bias, stride, pad))
    yield Case("conv", dims, forward, flops)
    yield Case("conv_weight", dims, backward(False, True, True), flops)
    yield Case("conv_input", dims, backward(True, False, False), flops)


def _pools(every: int) -> Iterator[Case]:
    back = torch.ops.aten.max_pool2d_with_indices_backward
    rest = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    for images, channels, width in _some(_POOLS, every):

        def image(shape: tuple[int, ...] = (images, channels, width, width)) -> tuple[Any, ...]:
            return torch.rand(shape).to(memory_format=torch.channels_last), [2, 2]

        def gradient(image: Callable[[], tuple[Any, ...]] = image) -> tuple[Any, ...]:
            x, _ = image()
            y, places = functional.max_pool2d_with_indices(x, [2, 2])
            return y, x, *rest, places

        dims = (channels, images * width * width)
        yield Case("pool", dims, _round(functional.max_pool2d_with_indices, image))
        yield Case("pool_backward", dims, _round(back, gradient))


def _norms(every: int) -> Iterator[Case]:
    for images, channels, width in _some(_NORMS, every):
        pixels = width * width
        weight, args = torch.ones(channels), (images, channels, pixels, min(8, channels))

        def make(
            shape: tuple[int, ...] = (images, channels, width, width),
            weight: Tensor = weight,
            args: tuple[int, ...] = args,
        ) -> tuple[Any, ...]:
            x = torch.rand(shape).to(memory_format=torch.channels_last)
            return x, weight, weight, *args, 1e-5

        def gradient(make: Callable[[], tuple[Any, ...]] = make) -> tuple[Any, ...]:
            x, weight, *rest = make()
            _, mean, scale = torch.native_group_norm(x, weight, *rest)
            return x.clone(), x, mean, scale, weight, *rest[1:-1], [True, True, True]

        values = (channels, images * pixels)
        yield Case("group_norm", values, _round(torch.native_group_norm, make))
        back = torch.ops.aten.native_group_norm_backward
        yield Case("group_norm_backward", values, _round(back, gradient))


def _lstms(every: int) -> Iterator[Case]:
    for length, batch, inputs, hidden in _some(_LSTMS, every):
        layer = nn.LSTM(inputs, hidden)
        dims = (length, batch, inputs, hidden)
        flops = 8.0 * length * batch * hidden * (inputs + hidden)

        def made(layer: nn.LSTM = layer, shape: tuple[int, ...] = (length, batch, inputs)) -> tuple[Any, ...]:
            x = torch.zeros(shape).requires_grad_()
            with torch.enable_grad():
                output = layer(x)[0]
            return output, [x, *layer.parameters()], torch.ones_like(output), True

        plain = _round(layer, partial(_ones, (length, batch, inputs)))
        yield Case("lstm", dims, plain, flops)
        yield Case("lstm_backward", dims, _round(torch.autograd.grad, made), 2 * flops)
