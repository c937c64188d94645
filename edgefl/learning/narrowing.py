"""Sub-models: which units of a model's layers a narrower one keeps, and where its values lie in the whole.

A unit is a dense layer's feature or a convolution's channel: one row of the tensor that makes it, and the
columns of those that read it. Layers that are added to each other share one set of units. The model's
inputs and outputs are always whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from edgefl.errors import ConfigError
from edgefl.parameters import Layout, Vector

if TYPE_CHECKING:
    from edgefl.learning.model import Model

Axes = tuple[str | None, ...]
"""The set of units that each of a tensor's first dimensions goes by; None: none, it stays whole."""


@dataclass(frozen=True)
class Flow:
    """What one block hands to the next: so many units, and the set that they are; None: always whole."""

    units: int
    group: str | None


@dataclass(frozen=True)
class Units:
    """A set of units. beside: of a branch's inner units, the set that the branch is added to."""

    name: str
    count: int
    beside: str | None = None


@dataclass(frozen=True)
class Part:
    """What a block says of itself. tensors: the axes of each of its parameters, by name within it.

    before, after: what comes in and goes out; inner: the units within a branch that is added to the output.
    """

    before: Flow
    after: Flow
    tensors: Mapping[str, Axes]
    inner: Flow | None = None


@runtime_checkable
class Narrowable(Protocol):
    """A block that can be built with fewer units."""

    def part(self, name: str, before: Flow, last: bool) -> Part:
        """How its tensors hang on sets of units. last: its output is the model's.

        Raises ConfigError where its values depend on units that are not there.
        """
        ...

    def narrowed(self, part: Part, size: Callable[[Flow], int]) -> Callable[[], nn.Module]:
        """The constructor of the same block with other sizes. part: as the block gave it."""
        ...


@dataclass(frozen=True)
class Narrowing:
    """A model's sets of units in order, its blocks' parts, and the axes of every tensor by name."""

    units: tuple[Units, ...]
    parts: tuple[Part, ...]
    axes: Mapping[str, Axes]

    @property
    def counts(self) -> dict[str, int]:
        """Units in each set."""
        return {u.name: u.count for u in self.units}


@dataclass(frozen=True, eq=False)
class SubModel:
    """A narrower model, and where its values lie in the whole one's vector.

    keep: the units kept of each set, ascending. index: (p,) int64, ascending within each tensor.
    """

    model: Model
    keep: Mapping[str, tuple[int, ...]]
    index: Tensor

    def extract(self, whole: Vector) -> Vector:
        """The narrower model's parameters out of the whole one's."""
        return Vector(self.model.layout, whole.values[self.index])

    def merge(self, whole: Vector, part: Vector, share: float = 1.0) -> Vector:
        """(1 - share) whole + share part where the narrower model is; all other values bit for bit."""
        return whole.replace(self.index, torch.lerp(whole.values[self.index], part.values, share))


def narrowing_of(model: Model, module: nn.Sequential) -> Narrowing:
    """How a model's blocks hang together. module: as the model builds it.

    Raises ConfigError, naming the block, for one that cannot be narrowed.
    """
    units: dict[str, Units] = {}
    parts: list[Part] = []
    flow = Flow(model.input_shape[0], None)
    for i, (name, block) in enumerate(zip(model.blocks, module, strict=True)):
        if not isinstance(block, Narrowable):
            accepted = f"its block {name} ({type(block).__name__}) cannot be narrowed; dense, convolutional "
            raise ConfigError("model.name", model.name, accepted + "and norm-free residual blocks can")
        part = block.part(name, flow, i == len(model.blocks) - 1)
        flow = part.after
        parts.append(part)
        if part.inner is not None and part.inner.group is not None:
            units[part.inner.group] = Units(part.inner.group, part.inner.units, beside=flow.group)
        if flow.group is not None:
            units.setdefault(flow.group, Units(flow.group, flow.units))
    axes = {
        f"{name}.{tensor}": groups
        for name, part in zip(model.blocks, parts, strict=True)
        for tensor, groups in part.tensors.items()
    }
    return Narrowing(tuple(units.values()), tuple(parts), axes)


def checked(
    model: Model, narrowing: Narrowing, keep: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """The units kept of every set, ascending; all of a set that is not named.

    Raises ValueError for an unknown set, none kept, a repeat, or a unit that does not exist.
    """
    counts = narrowing.counts
    for name in keep:
        if name not in counts:
            raise ValueError(f"{model.name} has no units {name!r}; it has {', '.join(counts) or 'none'}")
    kept = {}
    for name, count in counts.items():
        chosen = tuple(sorted(int(i) for i in keep.get(name, range(count))))
        if not chosen or len(set(chosen)) < len(chosen) or chosen[0] < 0 or chosen[-1] >= count:
            raise ValueError(f"{name} of {model.name}: some of its {count} units are needed, each once")
        kept[name] = chosen
    return kept


def narrow_factories(
    narrowing: Narrowing, module: nn.Sequential, sizes: Mapping[str, int]
) -> list[Callable[[], nn.Module]]:
    """The constructors of a model's blocks with so many units in each set."""

    def size(flow: Flow) -> int:
        return flow.units if flow.group is None else sizes[flow.group]

    factories = []
    for block, part in zip(module, narrowing.parts, strict=True):
        assert isinstance(block, Narrowable)
        factories.append(block.narrowed(part, size))
    return factories


def index_of(layout: Layout, narrowing: Narrowing, keep: Mapping[str, tuple[int, ...]]) -> Tensor:
    """(p,) int64: where the values that remain lie in the whole vector."""
    counts = narrowing.counts
    places = []
    for entry in layout.entries:
        place, stride = torch.tensor([entry.offset]), entry.numel
        axes = narrowing.axes[entry.name]
        for size, group in zip_longest(entry.shape, axes):
            stride //= size
            chosen = torch.arange(size)
            if group is not None:
                # A unit that is flattened has several columns, side by side.
                chosen = chosen.view(counts[group], -1)[list(keep[group])].reshape(-1)
            place = (place.unsqueeze(1) + chosen * stride).reshape(-1)
        places.append(place)
    return torch.cat(places)


def unit_scores(narrowing: Narrowing, change: Mapping[str, Tensor], group: str) -> Tensor:
    """(n,) how much each unit of a set moved: the sum of |change| over its rows and columns, biases apart.

    change: by name, each tensor's.
    """
    count = narrowing.counts[group]
    score = torch.zeros(count)
    for name, axes in narrowing.axes.items():
        tensor = change[name]
        if tensor.dim() < 2:
            continue
        for dimension, axis in enumerate(axes):
            if axis == group:
                score += tensor.abs().movedim(dimension, 0).reshape(count, -1).sum(1)
    return score
