"""Timing short calls on a machine that may have other things to do.

Time is this thread's on the processor: what other programs take of it meanwhile is left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WARM_UP = 10
"""Calls before any counts: they may load code or take memory."""
_BLOCK_S = 5e-4
_MOST_CALLS = 5_000


@dataclass(frozen=True)
class Sample:
    """seconds: of one call, the median of the repeats. spread: the middle half of them, as a share of it.

    quiet_s: the lower quartile, closer to what the call takes on a machine that does nothing else: each time
    another program has had the processor, it leaves the caches cold.
    """

    seconds: float
    quiet_s: float
    spread: float
    repeats: int


def measure(call: Callable[[], object], budget_s: float, least: int = 5) -> Sample:
    """Time a call for about budget_s seconds, and at least `least` times; short calls in blocks of many."""
    for _ in range(WARM_UP):
        call()
    began = time.thread_time()
    call()
    calls = max(1, min(_MOST_CALLS, round(_BLOCK_S / max(time.thread_time() - began, 1e-7))))
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < least or time.perf_counter() < end:
        began = time.thread_time()
        for _ in range(calls):
            call()
        taken.append((time.thread_time() - began) / calls)
    return summarised(taken)


def summarised(seconds: Sequence[float]) -> Sample:
    """The sample of these repeats."""
    middle = statistics.median(seconds)
    if len(seconds) < 2:
        return Sample(middle, middle, 0.0, len(seconds))
    quarters = statistics.quantiles(seconds, n=4, method="inclusive")
    spread = (quarters[2] - quarters[0]) / middle if middle else 0.0
    return Sample(middle, quarters[0], spread, len(seconds))
