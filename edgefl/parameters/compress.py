"""The [compress] table, and the two ways to make a vector smaller behind one interface."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from edgefl.parameters.quantise import dequantise, quantise
from edgefl.parameters.sparse import pack_sparse, top_k, unpack_sparse

Packed = tuple[Tensor, ...]
"""A vector as it travels compressed: two tensors, and after them the model's buffers as they are."""


class CompressConfig(BaseModel):
    """The [compress] table: how updates are made smaller, by every method that sends updates."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Literal["none", "top-k", "qsgd"] = "none"
    """top-k: the largest entries, the rest is kept for later; qsgd: every entry, to a few levels."""
    fraction: float = Field(default=0.01, gt=0, le=1)
    """top-k: share of the entries that is sent, at least one."""
    error_feedback: bool = True
    """top-k: what was not sent is added to the next update."""
    levels: int = Field(default=7, ge=1, le=32767)
    """qsgd: s; 7 levels and a sign take 4 bits."""
    bucket: int = Field(default=512, ge=8, multiple_of=8)
    """qsgd: entries that share a norm."""
    norm: Literal["2", "max"] = "2"
    """qsgd: a bucket's scale, its Euclidean norm or its largest magnitude."""

    @property
    def on(self) -> bool:
        return self.name != "none"

    @property
    def remembers(self) -> bool:
        """Whether a sender keeps what it did not send."""
        return self.name == "top-k" and self.error_feedback

    def pack(self, values: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Two tensors that stand for values (d,) float32; rng: quantisation's chance."""
        if self.name == "top-k":
            k = max(1, round(self.fraction * len(values)))
            return pack_sparse(values, top_k(values, k))
        return quantise(values, self.levels, self.bucket, rng, self.norm)

    def unpack(self, packed: Packed, size: int) -> Tensor:
        """(size,) what they stand for. Raises ValueError for tensors that cannot be that."""
        if len(packed) < 2:
            raise ValueError(f"two tensors are needed, found {len(packed)}")
        if self.name == "top-k":
            return unpack_sparse(packed[0], packed[1], size)
        return dequantise(packed[0], packed[1], size, self.levels, self.bucket)
