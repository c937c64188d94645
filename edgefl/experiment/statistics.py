"""Statistics over seeds: a mean with its 95 % interval, and ranks with ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=tuple[float, ...])

# Two-sided 95 % quantiles of Student's t by degrees of freedom; between two rows the upper one is used,
# which is on the wide side. Source: any table of the t distribution, e.g. NIST handbook 1.3.6.7.2.
_T_95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980,
}  # fmt: skip


def t_95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t with `degrees` >= 1 of freedom.

    >>> t_95(2), t_95(11)
    (4.303, 2.228)
    """
    return _T_95[max(d for d in _T_95 if d <= degrees)]


def mean_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean and the half width of its 95 % interval; None where there are no values, or one alone.

    Student's t over independent runs; it assumes that they scatter about normally.

    >>> mean_interval([1.0, 2.0, 3.0])[0], mean_interval([])
    (2.0, (None, None))
    """
    n = len(values)
    if n == 0:
        return None, None
    mean = math.fsum(values) / n
    if n < 2:
        return mean, None
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, t_95(n - 1) * deviation / math.sqrt(n)


def ranks(keys: Sequence[Key]) -> list[float]:
    """Rank of each key, 1 for the smallest; equal keys share the mean of their places.

    >>> ranks([(3.0,), (1.0,), (3.0,)])
    [2.5, 1.0, 2.5]
    """
    ordered = sorted(keys)
    return [ordered.index(key) + (ordered.count(key) + 1) / 2 for key in keys]
