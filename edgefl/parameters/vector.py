"""A model as one flat, immutable value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from edgefl.parameters.deferred import MEAN, MOST_VALUES, SUM, Order, Recipe, made
from edgefl.parameters.layout import Layout
from edgefl.parameters.moves import Moves


class Vector:
    """Parameters as one contiguous vector plus its layout; a value that nobody changes.

    values: (layout.size,) of layout.dtype; never written to after it is wrapped. Sums, differences and mixes
    of small vectors without buffers are made when somebody first reads them (see `deferred`).
    buffers: one tensor per entry of layout.buffers. Their rule: floating-point buffers follow the
    parameters through every operation; integer and boolean ones (counters) take the larger of the two.
    """

    __slots__ = ("_norm", "buffers", "held", "layout")

    def __init__(
        self, layout: Layout, values: Tensor, buffers: tuple[Tensor, ...] = (), norm: float | None = None
    ) -> None:
        """norm: the Euclidean one of the values, where it is known."""
        if values.shape != (layout.size,) or values.dtype != layout.dtype:
            raise ValueError(
                f"({layout.size},) {layout.dtype} values are needed, "
                f"found {tuple(values.shape)} {values.dtype}"
            )
        if len(buffers) != len(layout.buffers):
            raise ValueError(f"{len(layout.buffers)} buffers are needed, found {len(buffers)}")
        self.layout, self.buffers, self._norm = layout, buffers, norm
        self.held: Tensor | Recipe = values
        """The values, or how they follow from others."""

    @classmethod
    def rows(cls, layout: Layout, values: Tensor, norms: Sequence[float] | None = None) -> list[Vector]:
        """The rows of a matrix (n, layout.size) as vectors without buffers, which share its memory.

        norms: of each, where they are known.
        """
        if values.shape[1:] != (layout.size,) or values.dtype != layout.dtype or layout.buffers:
            cls(layout, values[0])  # says what is wrong
        found, known = [], itertools.repeat(None) if norms is None else norms
        for row, norm in zip(values.unbind(), known, strict=norms is not None):
            new = object.__new__(cls)
            new.layout, new.held, new.buffers, new._norm = layout, row, (), norm
            found.append(new)
        return found

    @property
    def values(self) -> Tensor:
        held = self.held
        if isinstance(held, Recipe):
            Order((self,)).make()
            return self.values
        return held

    @property
    def depth(self) -> int:
        """Recipes to be followed one after the other until the values are there."""
        held = self.held
        return held.depth if isinstance(held, Recipe) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the raw values and buffers: what a message with this vector carries as payload."""
        return self.layout.size * self.layout.dtype.itemsize + sum(b.nbytes for b in self.buffers)

    def _with(self, held: Tensor | Recipe, buffers: tuple[Tensor, ...] = ()) -> Vector:
        new = object.__new__(Vector)
        new.layout, new.held, new.buffers, new._norm = self.layout, held, buffers, None
        return new

    def _defers(self) -> bool:
        return not self.buffers and self.layout.size <= MOST_VALUES

    def _check(self, other: Vector) -> None:
        if other.layout is not self.layout and other.layout != self.layout:
            raise ValueError("vectors of one layout are needed")

    def _combine(self, other: Vector, op: Callable[[Tensor, Tensor], Tensor]) -> Vector:
        self._check(other)
        if not self.buffers:
            return self._with(op(self.values, other.values))
        pairs = zip(self.buffers, other.buffers, strict=True)
        buffers = tuple(op(a, b) if a.dtype.is_floating_point else torch.maximum(a, b) for a, b in pairs)
        return self._with(op(self.values, other.values), buffers)

    def _scale(self, op: Callable[[Tensor], Tensor]) -> Vector:
        return self._with(op(self.values), tuple(op(b) if b.is_floating_point() else b for b in self.buffers))

    def __add__(self, other: Vector) -> Vector:
        return self._sum(other, 1.0)

    def __sub__(self, other: Vector) -> Vector:
        return self._sum(other, -1.0)

    def _sum(self, other: Vector, factor: float) -> Vector:
        if not self._defers():
            return self._combine(other, torch.add if factor == 1 else torch.sub)
        self._check(other)
        return self._with(Recipe(SUM, (self, other), [factor]))

    def __mul__(self, factor: float) -> Vector:
        return self._scale(lambda t: t * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Vector:
        return self._scale(lambda t: t / divisor)

    def __neg__(self) -> Vector:
        return self._scale(torch.neg)

    def moved(self, change: Vector, rate: float) -> Vector:
        """self + rate change, rounded as lerp by a rate below 1/2 rounds it."""
        return self._combine(change, lambda a, b: torch.add(a, b, alpha=rate))

    def middle(self, other: Vector) -> Vector:
        """(self + other) / 2, summed in this order."""
        return self._combine(other, lambda a, b: torch.add(a, b).mul_(0.5))

    def lerp(self, other: Vector, share: float) -> Vector:
        """(1 - share) self + share other; share 1 gives `other` bit for bit, share 0 self."""
        return self._combine(other, lambda a, b: torch.lerp(a, b, share))

    def __getitem__(self, where: Tensor | slice) -> Tensor:
        """The values at an index set or slice, as a plain tensor: a fragment, a segment, a chunk."""
        return self.values[where]

    def with_values(self, values: Tensor) -> Vector:
        """The same layout and buffers with other values."""
        return Vector(self.layout, values, self.buffers)

    def replace(self, where: Tensor | slice, values: Tensor) -> Vector:
        """A copy with other values at an index set or slice."""
        copy = self.values.clone()
        copy[where] = values
        return self._with(copy, self.buffers)

    def equal(self, other: Vector) -> bool:
        """Bit-equal in values and buffers (a NaN equals nothing)."""
        return torch.equal(self.values, other.values) and all(
            torch.equal(a, b) for a, b in zip(self.buffers, other.buffers, strict=True)
        )

    def norm(self) -> float:
        """Euclidean norm of the values, taken once."""
        if self._norm is None:
            self._norm = float(torch.linalg.vector_norm(self.values))
        return self._norm

    def named(self) -> dict[str, Tensor]:
        """Parameters (views) and buffers by name."""
        tensors = self.layout.views(self.values)
        tensors.update((spec.name, b) for spec, b in zip(self.layout.buffers, self.buffers, strict=True))
        return tensors

    def __repr__(self) -> str:
        return f"Vector({self.layout.size} values)"


class WeightedMean:
    """A running weighted mean that holds one vector, however many are added; where threads are lent (see
    moves), also the latest few.

    The mean moves by `lerp` towards each value: a single value comes back bit for bit, equal values
    stay what they are, and arithmetic is in place at memory speed. `dtype` float64 keeps more bits, at
    about four times the cost. Integer buffers keep the largest.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype | None = None) -> None:
        self.layout, self.weight, self.count = layout, 0.0, 0
        self._dtype = dtype or layout.dtype
        self._mean: Moves | None = None
        self._buffers: list[Tensor] = []

    def add(self, vector: Vector, weight: float = 1.0) -> None:
        """Take one more value in. weight: nonnegative; one of zero changes nothing.

        Raises ValueError for a negative or non-finite weight, or another layout.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"a finite, nonnegative weight is needed, found {weight}")
        if vector.layout is not self.layout and vector.layout != self.layout:
            raise ValueError("vectors of one layout are needed")
        if weight == 0:
            return
        self.weight += weight
        self.count += 1
        if self._mean is None:
            self._mean = Moves(vector.values.to(self._dtype, copy=True))
            self._buffers = [b.clone() for b in vector.buffers]
            return
        share, values = weight / self.weight, vector.values
        self._mean.add(values if values.dtype is self._dtype else values.to(self._dtype), share)
        for kept, new in zip(self._buffers, vector.buffers, strict=True):
            if kept.is_floating_point():
                kept.lerp_(new, share)
            else:
                torch.maximum(kept, new, out=kept)

    def value(self, otherwise: Vector) -> Vector:
        """The mean so far, or `otherwise` when no weight came in (nobody reported, or only zeros)."""
        if self._mean is None:
            return otherwise
        values = self._mean.finish().to(self.layout.dtype, copy=True)
        return Vector(self.layout, values, tuple(b.clone() for b in self._buffers))


def mix(parameters: Mapping[int, Vector], row: Mapping[int, float]) -> Vector:
    """Average a neighborhood by one row of the mixing matrix.

    parameters: x_j by node id, the node's own included; one layout.
    row: W[i, j] for the same nodes; nonnegative, sums to 1 within 1e-6.
    Returns sum_j W[i, j] x_j, summed in float64 and ascending node id: arrival order changes nothing.
    Raises ValueError when the ids differ or the row does not sum to 1.
    Source: D-PSGD, neighborhood average (Lian et al. 2017, https://arxiv.org/abs/1705.09056).
    """
    if parameters.keys() != row.keys():
        raise ValueError(f"weights for nodes {sorted(row)} but models of {sorted(parameters)}")
    if abs(sum(row.values()) - 1) > 1e-6 or min(row.values()) < 0:
        raise ValueError(f"a row of nonnegative weights that sum to 1 is needed, found {dict(row)}")
    ids = sorted(parameters)
    vectors, weights = [parameters[j] for j in ids], [float(row[j]) for j in ids]
    first = vectors[0]
    for vector in vectors:
        first._check(vector)
    if first._defers():
        return first._with(Recipe(MEAN, vectors, weights))

    def weighted(tensors: Sequence[Tensor]) -> Tensor:
        if not tensors[0].dtype.is_floating_point:
            return torch.stack(list(tensors)).amax(0)
        return made(list(tensors), [[MEAN, *range(len(tensors))]], [weights])[0]

    buffers = tuple(map(weighted, zip(*(vector.buffers for vector in vectors), strict=True)))
    return first._with(weighted([vector.values for vector in vectors]), buffers)
