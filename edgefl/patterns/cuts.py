"""What both sides of a cut share: what crosses it, packed or as it is, and a part with its optimiser.

Per batch a client sends the smashed data of its front (blocks 0 .. cut - 1), with the labels where they are
shared, and gets the gradient at the cut. Labels travel as 32-bit integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from edgefl.data import Batch
from edgefl.nodes import Message, MethodConfig, Node
from edgefl.parameters import Vector
from edgefl.parameters.crossing import WHOLE, Packing, unpacked

State = tuple[Tensor, ...] | None
Turn = tuple[int, int]
"""(the server's life, round): answers to a server that has been restarted since are void."""


class CutConfig(MethodConfig):
    """What crosses the cut (its relative error is recorded as cut_error); the rest is [train]'s."""

    cut_bits: Literal[32, 8] = 32
    """Bits per value at the cut. 8: rounded by keyed chance, unbiased, on a scale per 512 values."""
    cut_keep: float = Field(default=1.0, gt=0, le=1)
    """Share of the values that cross, those of largest magnitude, with 32 bits; the others arrive as 0."""
    cut_noise: float = Field(default=0.0, ge=0)
    """Standard deviation of the normal noise that a client adds to its smashed data, on their own scale."""

    @property
    def packing(self) -> Packing:
        return Packing(self.cut_bits, self.cut_keep, self.cut_noise)

    @model_validator(mode="after")
    def _one_way_to_be_small(self) -> Self:
        if self.cut_bits == 8 and self.cut_keep < 1:
            raise ValueError("cut_keep below 1 goes with cut_bits = 32")
        return self


class OneCutConfig(CutConfig):
    """One cut for all clients."""

    cut: int = Field(default=1, ge=1)
    """Blocks at the front, on the client."""


class PlannedCutsConfig(CutConfig):
    """A planner finds a cut for each client, and its shares of the link and of the server."""

    reserve: bool = True
    """Whether each device's share of the link and of the server is kept for it. If not, who has something to
    send or to compute shares them with whoever else has: rounds are shorter than planned, mostly."""

    def kept(self, rate_bytes_per_s: float, share: float) -> tuple[float | None, float | None]:
        """What is kept for a client of the link and of the server; None: nothing is."""
        return (rate_bytes_per_s, share) if self.reserve else (None, None)


@dataclass(frozen=True)
class Across(Message):
    """What crosses a cut for one batch. values: a tensor of this shape, packed.

    A sender that goes through its turn again, after it was restarted, says the same again.
    """

    stale_by = "turn"
    once_by = ("sender", "turn", "step")
    noisy: ClassVar[bool] = False
    """Leaves a client, and takes the noise that is asked for."""
    turn: tuple[int, int]
    step: int
    shape: tuple[int, ...]
    values: tuple[Tensor, ...]

    def tensor(self) -> Tensor:
        """The tensor that crossed. Raises ValueError for values that do not fit the shape."""
        if len(self.values) == 1:
            return self.values[0].view(self.shape)
        return unpacked(self.values, math.prod(self.shape)).view(self.shape)


@dataclass(frozen=True)
class SmashedData(Across):
    """The front's output for a batch, and the labels where they are shared."""

    noisy = True
    labels: Tensor | None = None


@dataclass(frozen=True)
class SmashedGradient(Across):
    """The gradient of the batch's mean loss at the cut."""


@dataclass(frozen=True)
class Link:
    """One end of a cut in one turn: to whom, how tensors are packed, at what rate (None: as it comes)."""

    to: int
    turn: Turn
    packing: Packing = WHOLE
    rate_bytes_per_s: float | None = None

    @property
    def round(self) -> int:
        return self.turn[1]

    def send(self, node: Node, kind: type[Across], step: int, values: Tensor, **more: Any) -> None:
        """Send a tensor across the cut; record its relative error where it has one."""
        node.send(
            self.to, crossing(node, kind, self, step, values, **more), rate_bytes_per_s=self.rate_bytes_per_s
        )


def crossing(node: Node, kind: type[Across], link: Link, step: int, values: Tensor, **more: Any) -> Across:
    """The message of a tensor that crosses a cut."""
    shape = tuple(values.shape)
    packing = link.packing if kind.noisy else replace(link.packing, noise=0.0)
    if packing.exact:
        return kind(link.turn, step, shape, (values,), **more)
    rng = node.rng(f"cut {kind.__name__}", link.to, *link.turn, step)
    message = kind(link.turn, step, shape, packing.pack(values, rng), **more)
    size = float(torch.linalg.vector_norm(values))
    node.record(cut_error=float(torch.linalg.vector_norm(message.tensor() - values)) / size if size else 0.0)
    return message


def shared_labels(batch: Batch) -> Tensor:
    """Labels as they travel: integers in 32 bits."""
    return batch.y if batch.y.is_floating_point() else batch.y.to(torch.int32)


def received_labels(labels: Tensor) -> Tensor:
    """Labels as losses take them: integers in 64 bits."""
    return labels if labels.is_floating_point() else labels.to(torch.int64)


@dataclass(frozen=True)
class Part:
    """A part of a model with its optimiser's state: a value."""

    parameters: Vector
    state: State = None

    def stepped(self, node: Node, gradient: Vector, round: int) -> Part:
        """One step of [train]'s optimiser at the rate of `round`."""
        return Part(*node.optimizer.step(self.parameters, gradient, self.state, round))


def mean_of(values: Sequence[float]) -> float:
    """Their mean; NaN where there are none."""
    return math.fsum(values) / len(values) if values else math.nan
