"""A cut per device and a share of the server's link: EdgeSplit's alternating algorithm.

Source: Zhang et al. 2024 (https://arxiv.org/abs/2403.15815): a cut per device, shares of the bandwidth, and
alternation between the two. Choice: the formulas, which are the standard reconstruction.

Device n with cut l on b bytes per second needs T_n = a_n(l) + c_n(l) / b seconds a round. The longest of them
is minimised over cuts and shares, sum b_n <= B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

_HALVINGS = 200


@dataclass(frozen=True)
class DeviceCosts:
    """One device by cut: fixed_s: a(l); link_bytes: c(l) > 0; feasible: whether it may take the cut.

    cap_bytes_per_s: its own link, inf where only the shared one counts.
    """

    fixed_s: tuple[float, ...]
    link_bytes: tuple[float, ...]
    feasible: tuple[bool, ...]
    cap_bytes_per_s: float = math.inf

    @property
    def cuts(self) -> tuple[int, ...]:
        """The cuts that it may take, from 1."""
        return tuple(l + 1 for l, may in enumerate(self.feasible) if may)

    def seconds(self, cut: int, rate: float) -> float:
        """T(cut) at a rate in bytes per second."""
        return self.fixed_s[cut - 1] + self.link_bytes[cut - 1] / rate


@dataclass(frozen=True)
class CutPlan:
    """cuts, rates (bytes per second) and planned seconds of a round by device; history: the longest of them
    after each half step of the algorithm."""

    cuts: tuple[int, ...]
    rates: tuple[float, ...]
    seconds: tuple[float, ...]
    history: tuple[float, ...] = ()

    @property
    def round_s(self) -> float:
        return max(self.seconds)


def planned(devices: Sequence[DeviceCosts], cuts: Sequence[int], rates: Sequence[float]) -> CutPlan:
    """The plan of these cuts and rates."""
    seconds = tuple(d.seconds(l, b) for d, l, b in zip(devices, cuts, rates, strict=True))
    return CutPlan(tuple(cuts), tuple(rates), seconds)


def equal_rates(devices: Sequence[DeviceCosts], capacity: float) -> tuple[float, ...]:
    """B / N each, at most each one's own link."""
    return tuple(min(capacity / len(devices), d.cap_bytes_per_s) for d in devices)


def best_rates(devices: Sequence[DeviceCosts], cuts: Sequence[int], capacity: float) -> tuple[float, ...]:
    """The shares of `capacity` with which the last device ends first, at these cuts.

    All devices then end together, but for those that their own link keeps: what they leave is shared among
    the others, repeated until no device more is kept.
    """
    fixed = [d.fixed_s[l - 1] for d, l in zip(devices, cuts, strict=True)]
    sizes = [d.link_bytes[l - 1] for d, l in zip(devices, cuts, strict=True)]
    rates = [d.cap_bytes_per_s for d in devices]
    free = list(range(len(devices)))
    while free:
        kept = capacity - sum(rates[n] for n in range(len(devices)) if n not in free)
        shares = _even(kept, [fixed[n] for n in free], [sizes[n] for n in free])
        over = [n for n, b in zip(free, shares, strict=True) if b >= devices[n].cap_bytes_per_s]
        if not over:
            for n, b in zip(free, shares, strict=True):
                rates[n] = b
            break
        free = [n for n in free if n not in over]
    return tuple(rates)


def _even(capacity: float, fixed: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """The rates c / (T - a) at the T at which they sum to the capacity."""
    T = bisect(lambda T: sum(c / (T - a) for a, c in zip(fixed, sizes, strict=True)), capacity, max(fixed))
    rates = [c / (T - a) for a, c in zip(fixed, sizes, strict=True)]
    total = sum(rates)
    return [b * (capacity / total) for b in rates]  # the bisection's last bits: no more than there is


def bisect(need: Callable[[float], float], capacity: float, above: float) -> float:
    """The T > above at which need(T), which falls with T, is the capacity."""
    step = 1.0
    while need(above + step) > capacity:
        step *= 2
    low, high = above, above + step
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if need(middle) > capacity:
            low = middle
        else:
            high = middle
    return high


def best_cuts(devices: Sequence[DeviceCosts], rates: Sequence[float]) -> tuple[int, ...]:
    """Each device's own best cut at its rate; ties go to the smaller one."""
    return tuple(min(d.cuts, key=lambda l: (d.seconds(l, b), l)) for d, b in zip(devices, rates, strict=True))


def plan_cuts(devices: Sequence[DeviceCosts], capacity: float) -> CutPlan:
    """Cuts and rates by alternation: from equal rates, cuts and rates in turn until the cuts repeat.

    capacity: B, bytes per second of the server's link, each way. The longest time never rises.
    """
    rates = equal_rates(devices, capacity)
    cuts: tuple[int, ...] = ()
    history: list[float] = []
    while True:
        new = best_cuts(devices, rates)
        history.append(planned(devices, new, rates).round_s)
        if new == cuts:
            break
        cuts = new
        rates = best_rates(devices, cuts, capacity)
        history.append(planned(devices, cuts, rates).round_s)
    done = planned(devices, cuts, rates)
    return CutPlan(done.cuts, done.rates, done.seconds, tuple(history))


def best_common_cut(devices: Sequence[DeviceCosts], capacity: float, *, share: bool) -> CutPlan:
    """The one cut for all with the shortest round, at equal rates or, with `share`, at the best ones."""
    common = [l for l in devices[0].cuts if all(d.feasible[l - 1] for d in devices)]
    plans = [common_cut(devices, l, capacity, share=share) for l in common]
    return min(plans, key=lambda plan: plan.round_s)


def common_cut(devices: Sequence[DeviceCosts], cut: int, capacity: float, *, share: bool) -> CutPlan:
    """One cut for all."""
    cuts = [cut] * len(devices)
    rates = best_rates(devices, cuts, capacity) if share else equal_rates(devices, capacity)
    return planned(devices, cuts, rates)


def own_cuts_equal_rates(devices: Sequence[DeviceCosts], capacity: float) -> CutPlan:
    """Each device's best cut at equal rates."""
    rates = equal_rates(devices, capacity)
    return planned(devices, best_cuts(devices, rates), rates)


def shortest_round_s(devices: Sequence[DeviceCosts], capacity: float) -> float:
    """The optimum for any size, without own links: the T at which sum_n min_l c / (T - a) is the capacity."""

    def need(T: float) -> float:
        return sum(
            min(
                (d.link_bytes[l - 1] / (T - d.fixed_s[l - 1]) for l in d.cuts if d.fixed_s[l - 1] < T),
                default=math.inf,
            )
            for d in devices
        )

    return bisect(need, capacity, max(min(d.fixed_s[l - 1] for l in d.cuts) for d in devices))


def enumerated_round_s(devices: Sequence[DeviceCosts], capacity: float) -> float:
    """The optimum by trying all cuts: for a few devices."""
    choices = product(*(d.cuts for d in devices))
    return min(planned(devices, cuts, best_rates(devices, cuts, capacity)).round_s for cuts in choices)
