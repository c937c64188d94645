"""What a run tells whoever watches it."""

from __future__ import annotations

import time
from typing import Protocol

REPORT_EVERY_S = 0.1
"""Wall-clock seconds between updates at least, but for fresh values."""


class Progress(Protocol):
    """Shows how far a run is. Called from the thread that runs it."""

    def begin(
        self, description: str, *, time_s: float | None, rounds: int | None, metric: str, target: float | None
    ) -> None:
        """A run begins. time_s, rounds: where it ends at the latest, None: not by that."""
        ...

    def update(
        self, time_s: float, step: int, value: float | None, target: float | None, wall_s: float
    ) -> None:
        """time_s: on the run's clock; step: rounds or local steps; value: the metric as last evaluated."""
        ...

    def end(self, status: str) -> None:
        """The run is over: "finished", "stopped", "failed" or "interrupted"."""
        ...


class Reporter:
    """Passes what the observer sees on to a Progress, at a rate that people can follow."""

    def __init__(self, progress: Progress | None, target: float | None) -> None:
        self._progress, self._target = progress, target
        self.began = self._latest = time.monotonic()
        self._value: float | None = None

    def __call__(self, time_s: float, step: int, value: float | None = None) -> None:
        if self._progress is None:
            return
        now = time.monotonic()
        if value is None and now - self._latest < REPORT_EVERY_S:
            return
        self._latest = now
        self._value = self._value if value is None else value
        self._progress.update(time_s, step, self._value, self._target, now - self.began)

    @property
    def wall_s(self) -> float:
        """Wall-clock seconds so far."""
        return time.monotonic() - self.began
