"""Measured times of the operators that training is made of, and what they say of other sizes.

A kind of operator has dimensions and an amount of work that grows with them. Its time is an overhead, the
shortest of its rows, and the work at a rate. The rate at other dimensions is a plane through the logarithms
of the rates measured, plus what the nearest rows are off that plane, within the range of what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from edgefl.errors import nearest

_TELLING = 1.3
"""How many times the overhead a row's time should be to say something of the rate."""
Dims = tuple[float, ...]


def _conv_work(dims: Dims) -> float:
    c_in, c_out, kernel, pixels, _ = dims
    return c_in * c_out * kernel * kernel * pixels


def _lstm_work(dims: Dims) -> float:
    length, batch, inputs, hidden = dims
    return length * (batch * hidden * (inputs + hidden) + 2000.0)  # a step of no size still takes some time


KINDS: Mapping[str, tuple[tuple[str, ...], Callable[[Dims], float]]] = {
    "view": ((), lambda d: 0.0),
    "elementwise": (("bytes",), lambda d: d[0]),
    "strided": (("bytes",), lambda d: d[0]),
    "transcendental": (("values",), lambda d: d[0]),
    "softmax": (("rows", "columns"), lambda d: d[0] * (d[1] + 8)),
    "sum": (("rows", "columns"), lambda d: d[0] * d[1]),
    "gather": (("rows", "columns"), lambda d: d[0] * (d[1] + 8)),
    "scatter": (("rows", "columns"), lambda d: d[0] * (d[1] + 8)),
    "matmul": (("m", "n", "k"), math.prod),
    "bmm": (("b", "m", "n", "k"), math.prod),
    "conv": (("in", "out", "kernel", "pixels", "stride"), _conv_work),
    "conv_weight": (("in", "out", "kernel", "pixels", "stride"), _conv_work),
    "conv_input": (("in", "out", "kernel", "pixels", "stride"), _conv_work),
    "pool": (("channels", "pixels"), math.prod),
    "pool_backward": (("channels", "pixels"), math.prod),
    "group_norm": (("channels", "pixels"), math.prod),
    "group_norm_backward": (("channels", "pixels"), math.prod),
    "layer_norm": (("rows", "columns"), lambda d: d[0] * (d[1] + 8)),
    "layer_norm_backward": (("rows", "columns"), lambda d: d[0] * (d[1] + 8)),
    "lstm": (("length", "batch", "in", "hidden"), _lstm_work),
    "lstm_backward": (("length", "batch", "in", "hidden"), _lstm_work),
}
"""Each kind's dimensions, and its work in units of its own."""


class Kernels(BaseModel):
    """What the operators of a training step take on one device, in float32 on one thread."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    step_s: float = Field(ge=0, le=60)
    """Seconds of one training step apart from its operators: drawing a mini-batch, the calls themselves."""
    node_s: float = Field(ge=0, le=1)
    """Seconds that automatic differentiation adds for each operator that it follows, both passes together."""
    context_s: dict[str, float] = Field(default_factory=dict)
    """By kind: seconds that one call takes longer among other operators than when called again and again."""
    scale: float = Field(default=1.0, gt=0, le=10)
    """How many times longer all calls take in training steps."""
    times: dict[str, tuple[tuple[float, ...], ...]]
    """By kind (KINDS): rows of the dimensions and the seconds that one call took."""

    @model_validator(mode="after")
    def _complete(self) -> Kernels:
        for kind, rows in self.times.items():
            if kind not in KINDS:
                raise ValueError(f"times.{kind}: {nearest(kind, KINDS)}")
            columns = (*KINDS[kind][0], "seconds")
            for row in rows:
                if len(row) != len(columns) or min(row) <= 0:
                    raise ValueError(
                        f"times.{kind}: a row is {', '.join(columns)}, all positive; found {row}"
                    )
        for kind, extra_s in self.context_s.items():
            if kind not in KINDS or not 0 <= extra_s <= 1:
                raise ValueError(f"context_s.{kind}: seconds from 0 to 1; {nearest(kind, KINDS)}")
        missing = [kind for kind in KINDS if not self.times.get(kind)]
        if missing:
            raise ValueError(f"times.{missing[0]}: at least one row is needed")
        return self

    @cached_property
    def _curves(self) -> dict[str, _Curve]:
        return {kind: _Curve(kind, rows) for kind, rows in self.times.items()}

    def seconds(self, kind: str, dims: Dims) -> float:
        """What one call takes. dims: as KINDS names them."""
        return self.scale * (self._curves[kind].seconds(dims) + self.context_s.get(kind, 0.0))


class _Curve:
    """Rates of one kind by dimensions."""

    def __init__(self, kind: str, rows: tuple[tuple[float, ...], ...]) -> None:
        names, self._work = KINDS[kind]
        self.overhead_s = min(row[-1] for row in rows)
        # Rows that are mostly overhead say little of the rate.
        telling = [row for row in rows if row[-1] >= _TELLING * self.overhead_s] or list(rows)
        self._places = np.array([[math.log2(d) for d in row[:-1]] for row in telling])
        working = [max(row[-1] - self.overhead_s, 0.1 * row[-1]) for row in telling]
        self._logs = np.array(
            [math.log2(max(self._work(row[:-1]), 1.0) / s) for row, s in zip(telling, working, strict=True)]
        )
        self._plane = np.zeros(len(names) + 1)
        if len(telling) > len(names) + 1 and names:
            ones = np.ones((len(telling), 1))
            self._plane = np.linalg.lstsq(np.hstack([self._places, ones]), self._logs, rcond=None)[0]
        else:
            self._plane[-1] = self._logs.mean()
        self._off = self._logs - self._places @ self._plane[:-1] - self._plane[-1]

    def seconds(self, dims: Dims) -> float:
        work = self._work(dims)
        if not dims or work <= 0:
            return self.overhead_s
        place = np.log2(np.maximum(dims, 1.0))
        squares = ((self._places - place) ** 2).sum(1)
        weights = 1 / (squares + 1e-3) ** 1.5
        log = float(place @ self._plane[:-1] + self._plane[-1] + weights @ self._off / weights.sum())
        log = min(max(log, float(self._logs.min())), float(self._logs.max()))
        return float(self.overhead_s + work / 2.0**log)
