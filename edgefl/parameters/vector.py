"""A model as one flat, immutable value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from edgefl.parameters.layout import Layout


class Vector:
    """Parameters as one contiguous vector plus its layout; a value that nobody changes.

    values: (layout.size,) of layout.dtype; never written to after it is wrapped.
    buffers: one tensor per entry of layout.buffers. Their rule: floating-point buffers follow the
    parameters through every operation; integer and boolean ones (counters) take the larger of the two.
    """

    __slots__ = ("_norm", "buffers", "layout", "values")

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
        self.layout, self.values, self.buffers, self._norm = layout, values, buffers, norm

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
            new.layout, new.values, new.buffers, new._norm = layout, row, (), norm
            found.append(new)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the raw values and buffers: what a message with this vector carries as payload."""
        return self.values.nbytes + sum(b.nbytes for b in self.buffers)

    def _with(self, values: Tensor, buffers: tuple[Tensor, ...]) -> Vector:
        new = object.__new__(Vector)
        new.layout, new.values, new.buffers, new._norm = self.layout, values, buffers, None
        return new

    def _combine(self, other: Vector, op: Callable[[Tensor, Tensor], Tensor]) -> Vector:
        if other.layout is not self.layout and other.layout != self.layout:
            raise ValueError("vectors of one layout are needed")
        if not self.buffers:
            return self._with(op(self.values, other.values), ())
        pairs = zip(self.buffers, other.buffers, strict=True)
        buffers = tuple(op(a, b) if a.dtype.is_floating_point else torch.maximum(a, b) for a, b in pairs)
        return self._with(op(self.values, other.values), buffers)

    def _scale(self, op: Callable[[Tensor], Tensor]) -> Vector:
        return self._with(op(self.values), tuple(op(b) if b.is_floating_point() else b for b in self.buffers))

    def __add__(self, other: Vector) -> Vector:
        return self._combine(other, torch.add)

    def __sub__(self, other: Vector) -> Vector:
        return self._combine(other, torch.sub)

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
    """A running weighted mean that holds one vector, however many are added.

    The mean moves by `lerp` towards each value: a single value comes back bit for bit, equal values
    stay what they are, and arithmetic is in place at memory speed. `dtype` float64 keeps more bits, at
    about four times the cost. Integer buffers keep the largest.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype | None = None) -> None:
        self.layout, self.weight, self.count = layout, 0.0, 0
        self._dtype = dtype or layout.dtype
        self._mean: Tensor | None = None
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
            self._mean = vector.values.to(self._dtype, copy=True)
            self._buffers = [b.clone() for b in vector.buffers]
            return
        share, values = weight / self.weight, vector.values
        self._mean.lerp_(values if values.dtype is self._dtype else values.to(self._dtype), share)
        for kept, new in zip(self._buffers, vector.buffers, strict=True):
            if kept.is_floating_point():
                kept.lerp_(new, share)
            else:
                torch.maximum(kept, new, out=kept)

    def value(self, otherwise: Vector) -> Vector:
        """The mean so far, or `otherwise` when no weight came in (nobody reported, or only zeros)."""
        if self._mean is None:
            return otherwise
        values = self._mean.to(self.layout.dtype, copy=True)
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
    first = parameters[ids[0]]

    def weighted(tensors: list[Tensor]) -> Tensor:
        if not tensors[0].dtype.is_floating_point:
            return torch.stack(tensors).amax(0)
        total = tensors[0].to(torch.float64, copy=True).mul_(row[ids[0]])
        for j, tensor in zip(ids[1:], tensors[1:], strict=True):
            total.add_(tensor, alpha=row[j])
        return total.to(tensors[0].dtype)

    others = [parameters[j].layout for j in ids[1:]]
    if any(layout is not first.layout and layout != first.layout for layout in others):
        raise ValueError("vectors of one layout are needed")
    values = weighted([parameters[j].values for j in ids])
    buffers = tuple(weighted([parameters[j].buffers[k] for j in ids]) for k in range(len(first.buffers)))
    return Vector(first.layout, values, buffers)
