"""A link as it was measured, from one process to another."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_LEAST_STEADY_S = 0.002
Marks = Sequence[tuple[float, int]]
"""(seconds, bytes so far) of what has arrived."""


@dataclass(frozen=True)
class MeasuredLink:
    """The way to a process, seen from here; None for what could not be told.

    latency_s: one way, half the median round trip. jitter: half the spread of the round trips from the tenth
    to the ninetieth percentile, as a share of their median. loss: share of TCP segments that had to be sent
    again from here. num_bytes: of all that the measurement moved.
    """

    address: str
    latency_s: float
    jitter: float
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    loss: float | None
    num_bytes: int
    took_s: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_table(self) -> dict[str, Any]:
        """As a [network] link has it; the whole way counts as this end's. What is not known is left out."""
        table: dict[str, Any] = {}
        for word, rate in (("up", self.up_bytes_per_s), ("down", self.down_bytes_per_s)):
            if rate is not None:
                table[word] = f"{rate / 1e3:.0f} kB/s" if rate >= 1e6 else f"{rate / 1e3:.4g} kB/s"
        table |= {"latency": f"{1e3 * self.latency_s:.4g} ms", "jitter": round(self.jitter, 3)}
        return table if self.loss is None else table | {"loss": round(self.loss, 5)}


def latency_of(round_trips_s: Sequence[float]) -> tuple[float, float]:
    """(latency one way in seconds, its jitter) of some round trips, in seconds.

    >>> latency_of([0.04, 0.04, 0.04])
    (0.02, 0.0)
    """
    median = statistics.median(round_trips_s)
    tenths = statistics.quantiles(round_trips_s, n=10) if len(round_trips_s) > 1 else [median]
    return median / 2, min(0.99, (tenths[-1] - tenths[0]) / 2 / median)


def steady_rate(marks: Marks) -> float | None:
    """Bytes per second of what arrived, but for the first quarter of the time; None where that is too little.

    >>> steady_rate([(0.0, 50_000), (1.0, 60_000), (2.0, 80_000), (4.0, 120_000)])
    20000.0
    """
    if len(marks) < 3:
        return None
    first_s, last_s = marks[0][0], marks[-1][0]
    begin = next(mark for mark in marks[1:] if mark[0] >= first_s + (last_s - first_s) / 4)
    took_s = last_s - begin[0]
    return (marks[-1][1] - begin[1]) / took_s if took_s >= _LEAST_STEADY_S else None
