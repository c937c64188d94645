"""Where each named tensor of a model lies in its flat vector."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """One parameter tensor: its name, shape, and place in the vector (in values)."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BufferSpec:
    """One buffer (batch-norm statistics, a 0-d counter): its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Layout:
    """Names, shapes and offsets of a flat vector of `size` values, and the buffers that go with it."""

    entries: tuple[Entry, ...]
    buffers: tuple[BufferSpec, ...] = ()
    dtype: torch.dtype = torch.float32

    @classmethod
    def of_shapes(
        cls,
        shapes: Iterable[tuple[str, Sequence[int]]],
        buffers: Iterable[BufferSpec] = (),
        dtype: torch.dtype = torch.float32,
    ) -> Layout:
        """Lay tensors out one after the other, in the order given."""
        entries, offset = [], 0
        for name, shape in shapes:
            entry = Entry(name, tuple(shape), offset)
            entries.append(entry)
            offset += entry.numel
        return cls(tuple(entries), tuple(buffers), dtype)

    @classmethod
    def of_module(cls, module: nn.Module) -> Layout:
        """The layout of a module's parameters, in `named_parameters` order, and of its buffers."""
        parameters = list(module.named_parameters())
        dtypes = {p.dtype for _, p in parameters}
        if len(dtypes) > 1:
            raise ValueError(f"parameters of one dtype are needed, found {sorted(map(str, dtypes))}")
        return cls.of_shapes(
            ((name, p.shape) for name, p in parameters),
            (BufferSpec(name, tuple(b.shape), b.dtype) for name, b in module.named_buffers()),
            dtypes.pop() if dtypes else torch.float32,
        )

    @cached_property
    def size(self) -> int:
        """Number of values in the vector."""
        return sum(entry.numel for entry in self.entries)

    @cached_property
    def digest(self) -> int:
        """64 bits that two layouts share only if they are equal; travels with every vector."""
        text = repr([(e.name, e.shape) for e in self.entries]) + repr(self.buffers) + str(self.dtype)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def slice(self, name: str) -> slice:
        """The place of one tensor in the vector. Raises KeyError for an unknown name."""
        for entry in self.entries:
            if entry.name == name:
                return slice(entry.offset, entry.offset + entry.numel)
        raise KeyError(name)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each named tensor as a view of `flat`, whose last dimension is the vector: (..., size)."""
        if flat.shape[-1] != self.size:
            raise ValueError(f"a vector of {self.size} values is needed, found {flat.shape[-1]}")
        lead = flat.shape[:-1]
        return {e.name: flat[..., e.offset : e.offset + e.numel].view(*lead, *e.shape) for e in self.entries}
