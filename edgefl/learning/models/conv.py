"""Convolutional models for images of at least 8 x 8 pixels."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from edgefl.errors import ConfigError
from edgefl.learning.models.base import Blocks, Options, Problem
from edgefl.learning.models.dense import Dense
from edgefl.learning.narrowing import Axes, Flow, Part

Norm = Literal["group", "none", "batch"]


class SlicedConv(nn.Conv2d):
    """A convolution of stride 1 whose output has the size of its input, and whose channels are units."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2)

    def part(self, name: str, before: Flow, last: bool) -> Part:
        own = None if last else name
        tensors = {"weight": (own, before.group), "bias": (own,)}
        return Part(before, Flow(self.out_channels, own), tensors)

    def narrowed(self, part: Part, size: Callable[[Flow], int]) -> Callable[[], nn.Module]:
        return partial(type(self), size(part.before), size(part.after), self.kernel_size[0])


class ConvPool(SlicedConv):
    """Convolution, 2 x 2 max pooling, ReLU: (B, C, H, W) to (B, C', H // 2, W // 2).

    ReLU after pooling gives the same values as before it, on a quarter of the numbers (a step of a small
    network measured 1.55 times faster).
    """

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(functional.max_pool2d(super().forward(x), 2))


class Conv(SlicedConv):
    """Convolution and ReLU: (B, C, H, W) to (B, C', H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(super().forward(x))


class VGGOptions(Options):
    """Convolutions of 3 x 3, some with pooling, then two dense layers, after VGG (Simonyan and Zisserman
    2015, https://arxiv.org/abs/1409.1556): many blocks of unlike cost, a model to cut."""

    channels: tuple[int, ...] = Field(default=(32, 32, 64, 64, 128), min_length=1)
    """Channels of each convolution."""
    pooled: tuple[int, ...] = (2, 4, 5)
    """Convolutions, counted from 1, that are followed by 2 x 2 max pooling."""
    hidden: int = Field(default=128, gt=0)
    """Units of the hidden dense layer."""

    def blocks(self, problem: Problem) -> Blocks:
        before, height, width = image_shape("vgg", problem)
        halvings = sum(1 for i in self.pooled if 1 <= i <= len(self.channels))
        if min(height, width) < 2**halvings or halvings < len(set(self.pooled)):
            most = int(math.log2(min(height, width)))
            accepted = f"convolutions 1 to {len(self.channels)}, at most {most} of them"
            raise ConfigError("model.pooled", self.pooled, accepted)
        blocks: list[tuple[str, Callable[[], nn.Module]]] = []
        for i, channels in enumerate(self.channels, start=1):
            kind = ConvPool if i in self.pooled else Conv
            blocks.append((f"conv{i}", partial(kind, before, channels, 3)))
            before = channels
        flat = before * (height // 2**halvings) * (width // 2**halvings)
        return (
            *blocks,
            ("hidden", partial(Dense, flat, self.hidden, True)),
            ("output", partial(Dense, self.hidden, problem.num_outputs, False)),
        )


class CNNOptions(Options):
    """Two convolutions with pooling, then two dense layers, after LeNet-5 (LeCun et al. 1998)."""

    channels: tuple[int, int] = (8, 16)
    """Channels of the two convolutions."""
    hidden: int = Field(default=64, gt=0)
    """Units of the hidden dense layer."""
    kernel_size: Literal[3, 5] = 5
    """Width of the convolutions, in pixels."""

    def blocks(self, problem: Problem) -> Blocks:
        in_channels, height, width = image_shape("cnn", problem)
        c1, c2 = self.channels
        flat = c2 * (height // 4) * (width // 4)
        return (
            ("conv1", partial(ConvPool, in_channels, c1, self.kernel_size)),
            ("conv2", partial(ConvPool, c1, c2, self.kernel_size)),
            ("hidden", partial(Dense, flat, self.hidden, True)),
            ("output", partial(Dense, self.hidden, problem.num_outputs, False)),
        )


class Stem(nn.Module):
    """The first convolution of a residual network: (B, C, H, W) to (B, C', H, W)."""

    def __init__(self, in_channels: int, channels: int, norm: Norm) -> None:
        super().__init__()
        self.conv = _conv3(in_channels, channels, 1, norm)
        self.norm = _norm(norm, channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.conv(x)))

    def part(self, name: str, before: Flow, last: bool) -> Part:
        _check_norm(name, self.norm)
        tensors = {"conv.weight": (name, before.group), "conv.bias": (name,)}
        return Part(before, Flow(self.conv.out_channels, name), tensors)

    def narrowed(self, part: Part, size: Callable[[Flow], int]) -> Callable[[], nn.Module]:
        return partial(Stem, size(part.before), size(part.after), "none")


class Residual(nn.Module):
    """relu(shortcut(x) + scale branch(x)): (B, C, H, W) to (B, C', H / stride, W / stride).

    With norm "none" the scale is one learned number, the branch's last convolution starts at zero, and
    its first is shrunk by the square root of the number of blocks (Fixup, Zhang et al. 2019,
    https://arxiv.org/abs/1901.09321, without its scalar biases: the convolutions have biases). No value
    then depends on other channels or examples, so that channels can be sliced exactly.
    inner: channels within the branch, as many as go out where None. projects: whether the shortcut is a
    convolution; where None, only if it has to be.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        norm: Norm,
        num_blocks: int,
        inner: int | None = None,
        projects: bool | None = None,
    ) -> None:
        super().__init__()
        self.num_blocks, self.stride = num_blocks, stride
        inner = channels if inner is None else inner
        self.conv1 = _conv3(in_channels, inner, stride, norm)
        self.norm1 = _norm(norm, inner)
        self.conv2 = _conv3(inner, channels, 1, norm)
        self.norm2 = _norm(norm, channels)
        same = stride == 1 and in_channels == channels if projects is None else not projects
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, channels, 1, stride)
        self.scale = _Scale() if norm == "none" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch = functional.relu(self.norm1(self.conv1(x)))
        branch = self.norm2(self.conv2(branch))
        return functional.relu(self.shortcut(x) + self.scale(branch))

    def initialise(self) -> None:
        if isinstance(self.scale, _Scale):
            self.conv1.weight.mul_(self.num_blocks**-0.5)
            self.conv2.weight.zero_()

    def part(self, name: str, before: Flow, last: bool) -> Part:
        _check_norm(name, self.norm1)
        projects = isinstance(self.shortcut, nn.Conv2d)
        own, inner = name if projects else before.group, f"{name}.inner"
        tensors: dict[str, Axes] = {
            "conv1.weight": (inner, before.group),
            "conv1.bias": (inner,),
            "conv2.weight": (own, inner),
            "conv2.bias": (own,),
            "scale.value": (),
        }
        if projects:
            tensors |= {"shortcut.weight": (own, before.group), "shortcut.bias": (own,)}
        branch = Flow(self.conv1.out_channels, inner)
        return Part(before, Flow(self.conv2.out_channels, own), tensors, branch)

    def narrowed(self, part: Part, size: Callable[[Flow], int]) -> Callable[[], nn.Module]:
        assert part.inner is not None
        into, inner, out = size(part.before), size(part.inner), size(part.after)
        projects = isinstance(self.shortcut, nn.Conv2d)
        return partial(Residual, into, out, self.stride, "none", self.num_blocks, inner, projects)


class PooledDense(Dense):
    """Mean over the pixels, then a dense layer: (B, C, H, W) to (B, outputs)."""

    def features(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class ResNetOptions(Options):
    """A small residual network (He et al. 2016, https://arxiv.org/abs/1512.03385)."""

    channels: tuple[int, ...] = Field(default=(16, 32), min_length=1)
    """Channels of each group of blocks; the image is halved between groups."""
    blocks_per_group: int = Field(default=1, gt=0)
    """Residual blocks in each group."""
    norm: Norm = "group"
    """Normalisation: by groups of channels, none (scaled residuals), or by batch statistics."""

    def blocks(self, problem: Problem) -> Blocks:
        in_channels, _, _ = image_shape("resnet", problem)
        total = len(self.channels) * self.blocks_per_group
        blocks: list[tuple[str, Callable[[], nn.Module]]] = [
            ("stem", partial(Stem, in_channels, self.channels[0], self.norm))
        ]
        before = self.channels[0]
        for i in range(total):
            group, place = divmod(i, self.blocks_per_group)
            now, stride = self.channels[group], 2 if group and not place else 1
            blocks.append((f"residual{i + 1}", partial(Residual, before, now, stride, self.norm, total)))
            before = now
        return (*blocks, ("output", partial(PooledDense, before, problem.num_outputs, False)))


class _Scale(nn.Module):
    """One learned number, at first 1, times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value


def image_shape(model: str, problem: Problem) -> tuple[int, int, int]:
    """(channels, height, width) of the examples. Raises ConfigError for anything but images."""
    shape = problem.input_shape
    if problem.task == "language" or len(shape) != 3 or min(shape[1:]) < 4:
        raise ConfigError(
            "model.name", model, f"it takes images (C, H, W), the data is {shape} {problem.task}"
        )
    return shape[0], shape[1], shape[2]


def _conv3(in_channels: int, channels: int, stride: int, norm: Norm) -> nn.Conv2d:
    return nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=norm == "none")


def _norm(norm: Norm, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        groups = next(g for g in (8, 4, 2, 1) if channels % g == 0)
        return nn.GroupNorm(groups, channels)
    return nn.Identity()


def _check_norm(name: str, norm: nn.Module) -> None:
    """Raises ConfigError where a block normalises: its values would depend on channels that are not there."""
    if not isinstance(norm, nn.Identity):
        found = "batch" if isinstance(norm, nn.BatchNorm2d) else "group"
        raise ConfigError("model.norm", found, f"block {name} can be narrowed with norm = 'none' only")
