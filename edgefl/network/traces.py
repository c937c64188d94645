"""Traces: a quantity that changes in steps over time, from a file or drawn."""

from __future__ import annotations

import bisect
import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from edgefl.errors import ConfigError
from edgefl.keyed import generator


@dataclass(frozen=True)
class Trace:
    """times_s: ascending, the first 0; values[i] holds from times_s[i] on. period_s: after it the trace
    begins again; None: the last value stays."""

    times_s: tuple[float, ...]
    values: tuple[float, ...]
    period_s: float | None = None

    def value(self, time_s: float) -> float:
        """What holds at this time."""
        return self.values[bisect.bisect_right(self.times_s, self._place(time_s)) - 1]

    def next_change_s(self, time_s: float) -> float:
        """The first time after time_s at which another step begins; inf where none does."""
        place = self._place(time_s)
        i = bisect.bisect_right(self.times_s, place)
        if i < len(self.times_s):
            change_s = time_s - place + self.times_s[i]
        elif self.period_s is not None:
            change_s = time_s - place + self.period_s
        else:
            return math.inf
        # So far out that the step is less than the clock can tell: the next time that it can.
        return max(change_s, math.nextafter(time_s, math.inf))

    def done_s(self, time_s: float, amount: float) -> float:
        """When an amount that grows with the value per second, begun at time_s, is reached; inf where never.

        With values as speeds, amount is the seconds that work takes at speed 1.
        """
        left, now = amount, time_s
        while True:
            speed, end_s = self.value(now), self.next_change_s(now)
            if speed > 0 and left <= speed * (end_s - now):
                return now + left / speed
            if end_s == math.inf:
                return math.inf
            left -= speed * (end_s - now)
            now = end_s

    def _place(self, time_s: float) -> float:
        return time_s if self.period_s is None else math.fmod(time_s, self.period_s)


def read_trace(path: Path, key: str, *, least: float = 0.0, most: float = math.inf) -> Trace:
    """A trace from a CSV file: a line "time_s,value" as header, then the steps in order of time.

    The value before the first step is that of the first step. Raises ConfigError, with the line, for times
    that do not rise and values outside least to most.
    """
    rows = read_columns(path, key, ("time_s", "value"))
    times, values = [row[0] for row in rows], [row[1] for row in rows]
    check_rising(times, path, key)
    for i, value in enumerate(values):
        if not least <= value <= most:
            raise ConfigError(
                key, str(path), f"line {i + 2}: a value from {least:g} to {most:g}, not {value:g}"
            )
    return Trace((0.0, *times[1:]), tuple(values))


def read_columns(path: Path, key: str, names: Sequence[str]) -> list[tuple[float, ...]]:
    """The rows of a CSV file with these columns, as numbers. Raises ConfigError, with the line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(key, str(path), f"a CSV file that can be read ({error})") from error
    if not lines or [cell.strip() for cell in lines[0]] != list(names):
        raise ConfigError(key, str(path), f"a first line {','.join(names)}")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            row = tuple(float(cell) for cell in line)
        except ValueError:
            row = ()
        if len(row) != len(names) or not all(map(math.isfinite, row)):
            raise ConfigError(key, str(path), f"line {number}: {len(names)} numbers, not {','.join(line)!r}")
        rows.append(row)
    if not rows:
        raise ConfigError(key, str(path), "at least one line of figures")
    return rows


def check_rising(times: Sequence[float], path: Path, key: str, first_line: int = 2) -> None:
    """Raises ConfigError where a time is negative or not after the one before."""
    if times[0] < 0:
        raise ConfigError(key, str(path), f"line {first_line}: a time from 0 on, not {times[0]:g}")
    for i, (before, time_s) in enumerate(pairwise(times)):
        if time_s <= before:
            accepted = f"line {first_line + 1 + i}: times that rise, not {time_s:g} after {before:g}"
            raise ConfigError(key, str(path), accepted)


def drawn_trace(
    seed: int,
    purpose: str,
    node: int,
    *,
    high: float,
    low: float,
    mean_high_s: float,
    mean_low_s: float,
    until_s: float,
) -> Trace:
    """High and low in turn, each for a time drawn from an exponential distribution, keyed by (seed, purpose,
    node); begins with either, as often as it is that. After until_s it begins again."""
    rng = generator(seed, purpose, node)
    is_high = rng.random() < mean_high_s / (mean_high_s + mean_low_s)
    times, values, now = [], [], 0.0
    while now < until_s:
        times.append(now)
        values.append(high if is_high else low)
        now += max(float(rng.exponential(mean_high_s if is_high else mean_low_s)), 1e-6 * until_s)
        is_high = not is_high
    return Trace(tuple(times), tuple(values), until_s)
