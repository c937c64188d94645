"""How flows share capacities: reserved rates first, the rest max-min fair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

Flow = tuple[Sequence[int], float, float | None]
"""(resources crossed, each once; most of its own, or inf; reserved rate, or None), in bytes per second."""


def max_min(capacities: Mapping[int, float] | Sequence[float], flows: Sequence[Flow]) -> list[float]:
    """The rate of each flow, in bytes per second.

    capacities: rate of each resource, by its integer id.
    A flow with a reserved rate gets exactly that, or, on overbooked resources, the share that the most
    overbooked of them has to give. The others share what is left: all grow together, and a flow stops when
    one of its resources is full or its own most is reached. No flow can then gain without a smaller or equal
    one losing. A flow that crosses nothing and has no most of its own gets inf.
    Source: progressive filling, Bertsekas and Gallager, Data Networks, section 6.5.2.

    >>> max_min([10.0, 4.0], [((0,), float("inf"), None), ((0, 1), float("inf"), None), ((1,), 1.0, None)])
    [7.0, 3.0, 1.0]
    """
    rates = [0.0] * len(flows)
    crossing: dict[int, list[int]] = {}
    capped: list[tuple[float, int]] = []
    booked: list[int] = []
    for f, (crossed, cap, reserved) in enumerate(flows):
        if reserved is not None:
            booked.append(f)
            continue
        if cap != float("inf") or not crossed:
            capped.append((cap, f))
        for r in crossed:
            if r in crossing:
                crossing[r].append(f)
            else:
                crossing[r] = [f]
    left = {r: capacities[r] for r in crossing}
    if booked:
        _book(capacities, flows, booked, rates, left)
    _fill(flows, crossing, sorted(capped), left, rates)
    return rates


def _book(
    capacities: Mapping[int, float] | Sequence[float],
    flows: Sequence[Flow],
    booked: list[int],
    rates: list[float],
    left: dict[int, float],
) -> None:
    """Rates of the flows that hold a reservation, taken off what is left for the others."""
    wanted: dict[int, float] = {}
    for f in booked:
        crossed, cap, reserved = flows[f]
        rates[f] = min(reserved or 0.0, cap)
        for r in crossed:
            wanted[r] = wanted.get(r, 0.0) + rates[f]
    scale = {r: min(1.0, capacities[r] / total) if total > 0 else 1.0 for r, total in wanted.items()}
    for f in booked:
        crossed = flows[f][0]
        rates[f] *= min([scale[r] for r in crossed], default=1.0)
        for r in crossed:
            if r in left:
                left[r] = max(0.0, left[r] - rates[f])


def _fill(
    flows: Sequence[Flow],
    crossing: dict[int, list[int]],
    capped: list[tuple[float, int]],
    left: dict[int, float],
    rates: list[float],
) -> None:
    """Raise the common level from stop to stop: the next full resource, or the next flow at its own most.

    The equal share of a resource only grows while flows elsewhere stop, so a share that is read too low
    from the heap is put back with its present value.
    """
    open_flows = {r: len(fs) for r, fs in crossing.items()}
    shares = [(left[r] / count, r) for r, count in open_flows.items()]
    heapify(shares)
    stopped = [flow[2] is not None for flow in flows]
    next_cap = 0
    while shares or next_cap < len(capped):
        level, r = shares[0] if shares else (float("inf"), -1)
        if next_cap < len(capped) and capped[next_cap][0] <= level:
            level, f = capped[next_cap]
            next_cap += 1
            stopping = [] if stopped[f] else [f]
        else:
            heappop(shares)
            if not open_flows[r]:
                continue
            share = left[r] / open_flows[r]
            if share > level:
                heappush(shares, (share, r))
                continue
            stopping = [f for f in crossing[r] if not stopped[f]]
        for f in stopping:
            stopped[f] = True
            rates[f] = level
            for crossed in flows[f][0]:
                left[crossed] = max(0.0, left[crossed] - level)
                open_flows[crossed] -= 1
