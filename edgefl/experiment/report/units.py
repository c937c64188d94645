"""Figures as people read them: three significant digits, and always a unit."""

from __future__ import annotations

import math
from dataclasses import dataclass

NONE = "—"
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float | None, digits: int = 3) -> str:
    """A plain figure: `digits` significant digits, thousands separated.

    >>> number(1234567.0), number(0.01234), number(None)
    ('1,234,567', '0.0123', '—')
    """
    if value is None or not math.isfinite(value):
        return NONE
    if math.isclose(value, round(value), rel_tol=1e-9) or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 9)}f}"


def plain(value: float) -> str:
    """A round figure (a tick, a target) without trailing zeros.

    >>> plain(0.9), plain(20000.0)
    ('0.9', '20,000')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def scaled(value: float | None, unit: str) -> str:
    """With a decimal prefix from 1,000 on.

    >>> scaled(1.5e6, "B"), scaled(12, "J")
    ('1.50 MB', '12 J')
    """
    if value is None or not math.isfinite(value):
        return NONE
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{number(value / factor)} {prefix}{unit}"
    return f"{number(value)} {unit}"


def seconds(value: float | None) -> str:
    """A duration.

    >>> seconds(0.0042), seconds(42.0), seconds(192.4), seconds(7500)
    ('4.20 ms', '42 s', '3 min 12 s', '2 h 5 min')
    """
    if value is None or not math.isfinite(value):
        return NONE
    if 0 < abs(value) < 1:
        return f"{number(value * 1e3)} ms" if abs(value) >= 1e-3 else f"{number(value * 1e6)} µs"
    if abs(value) < 120:
        return f"{number(value)} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def share(part: float, whole: float) -> str:
    """A share of a whole in per cent.

    >>> share(1.0, 3.0), share(1.0, 0.0)
    ('33 %', '—')
    """
    if whole <= 0:
        return NONE
    percent = 100 * (part / whole)
    return f"{percent:.0f} %" if percent >= 1 or percent == 0 else "under 1 %"


@dataclass(frozen=True)
class Scale:
    """How an axis writes its values: value / factor, in `unit`."""

    factor: float
    unit: str


PLAIN = Scale(1.0, "")


def plus_minus(mean: float, half: float, scale: Scale) -> str:
    """A mean and half its interval, in one unit.

    >>> plus_minus(4040.0, 161.0, prefix_scale(4040.0, "J")), plus_minus(0.9, 0.01, PLAIN)
    ('4.04 ± 0.16 kJ', '0.900 ± 0.010')
    """
    return f"{number(mean / scale.factor)} ± {number(half / scale.factor, 2)} {scale.unit}".rstrip()


def time_scale(longest_s: float) -> Scale:
    """The unit of a time axis that ends at `longest_s`."""
    if longest_s >= 3 * 3600:
        return Scale(3600.0, "h")
    return (
        Scale(60.0, "min") if longest_s >= 300 else Scale(1.0, "s") if longest_s >= 1 else Scale(1e-3, "ms")
    )


def prefix_scale(largest: float, unit: str) -> Scale:
    """The unit of an axis of bytes or joules that ends at `largest`."""
    for factor, prefix in _PREFIXES:
        if largest >= factor:
            return Scale(factor, prefix + unit)
    return Scale(1.0, unit)


def error(measured: float | None, foreseen: float | None) -> str:
    """How far the prediction is off, in per cent of what was measured.

    >>> error(2.0, 2.1), error(0.0, 1.0)
    ('+5.0 %', '—')
    """
    return f"{100 * (foreseen / measured - 1):+.1f} %" if measured and foreseen is not None else NONE
