"""Stages on machines: devices of which some pairs have faster links than others.

Source: DAPPLE, Fan et al. 2021 (https://arxiv.org/abs/2007.01045), and its public planner: a dynamic
programme over (first j layers, occupied devices) in which each next stage tries three placements. Fresh
first: on unused machines before used ones; append first: on used machines before unused ones; scatter first:
on all machines in turn. Choices: a machine is a set of devices that are joined by links faster than the
slowest link of all; within a machine the fastest device goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from edgefl.planning.pipeline import Costs, Stage, overlaps
from edgefl.planning.simulate import Links

Machines = Sequence[Sequence[int]]
Stages = tuple[Stage, ...]


def machines_of(links: Links, devices: Sequence[int]) -> list[list[int]]:
    """The machines, by lowest device; a single one, or one of each device, where all links are alike."""
    pairs = [(a, b) for a in devices for b in devices if a != b]
    slowest = min((links.rate(a, b) for a, b in pairs), default=0.0)
    machine = {d: d for d in devices}
    for a, b in pairs:
        if min(links.rate(a, b), links.rate(b, a)) > slowest * 1.01 and machine[a] != machine[b]:
            old, new = sorted((machine[a], machine[b]), reverse=True)
            machine = {d: new if m == old else m for d, m in machine.items()}
    return [[d for d in devices if machine[d] == m] for m in sorted(set(machine.values()))]


def fresh_first(free: Machines, used: Sequence[bool]) -> Iterator[int]:
    """Devices of unused machines, then those of used ones."""
    for wanted in (False, True):
        for machine, is_used in zip(free, used, strict=True):
            if is_used is wanted:
                yield from machine


def append_first(free: Machines, used: Sequence[bool]) -> Iterator[int]:
    """Devices of used machines, then those of unused ones."""
    for wanted in (True, False):
        for machine, is_used in zip(free, used, strict=True):
            if is_used is wanted:
                yield from machine


def scatter_first(free: Machines, used: Sequence[bool]) -> Iterator[int]:
    """A device of each machine in turn."""
    for n in range(max(map(len, free))):
        yield from (machine[n] for machine in free if n < len(machine))


PLACEMENTS: tuple[Callable[[Machines, Sequence[bool]], Iterator[int]], ...] = (
    fresh_first,
    append_first,
    scatter_first,
)


def lines_of_machines(costs: Costs, links: Links, devices: Sequence[int]) -> list[list[int]]:
    """Devices in the order of fresh first, and of scatter first; none for a flat network."""
    machines = _fast_first(costs, links, devices)
    unused = [False] * len(machines)
    return [list(place(machines, unused)) for place in (fresh_first, scatter_first) if machines]


def _fast_first(costs: Costs, links: Links, devices: Sequence[int]) -> Machines:
    """The machines, the fastest device of each first; none for a flat network."""
    machines = machines_of(links, devices)
    if len(machines) in (1, len(devices)):
        return []
    return [sorted(machine, key=lambda d: (-costs.speed(d), d)) for machine in machines]


def placed_on_machines(costs: Costs, links: Links, devices: Sequence[int], size: int) -> Iterator[Stages]:
    """The plans that the dynamic programme ends with, the best for each set of occupied devices.

    size: rows of a micro-batch. None where the network is flat. The value of a prefix is its longest stage
    or transfer, both ways; it knows no all-reduce, which is why it is not alone.
    """
    machines = _fast_first(costs, links, devices)
    if not machines:
        return
    N, G = costs.num_layers, len(devices)
    best: list[dict[frozenset[int], tuple[float, Stages]]] = [{} for _ in range(N + 1)]
    best[0][frozenset()] = (0.0, ())
    for j in range(N):
        for used, (value, stages) in best[j].items():
            for chosen in _next_devices(machines, used, min(G, size)):
                for last in range(j + 1, N + 1):
                    stage = Stage(j, last, chosen, tuple(costs.speed(d) for d in chosen))
                    new = max(value, _stage_s(stage, costs, size))
                    if stages:
                        new = max(new, 2 * _crossing_s(stages[-1], stage, costs, links, size))
                    taken = used | set(chosen)
                    if taken not in best[last] or new < best[last][taken][0]:
                        best[last][taken] = (new, (*stages, stage))
    yield from (stages for _, stages in best[N].values())


def _next_devices(machines: Machines, used: frozenset[int], most: int) -> list[tuple[int, ...]]:
    """What a next stage may stand on: each placement's first devices, for any count."""
    free = [[d for d in machine if d not in used] for machine in machines]
    is_used = [len(left) < len(machine) for left, machine in zip(free, machines, strict=True)]
    found: dict[tuple[int, ...], None] = {}
    for place in PLACEMENTS:
        order = tuple(place(free, is_used))
        for count in range(1, min(most, len(order)) + 1):
            found[order[:count]] = None
    return list(found)


def _stage_s(stage: Stage, costs: Costs, size: int) -> float:
    """Both passes of a micro-batch, at the slowest replica."""
    return max(
        costs.forward_s(stage.first, stage.last, d, b - a)
        + costs.backward_s(stage.first, stage.last, d, b - a)
        for d, (a, b) in zip(stage.devices, stage.rows(size), strict=True)
    )


def _crossing_s(upper: Stage, lower: Stage, costs: Costs, links: Links, size: int) -> float:
    """One way of a micro-batch over a cut, at the slowest pair."""
    return max(
        costs.cut_bytes(lower.first, end - begin) / links.rate(upper.devices[i], lower.devices[j])
        for i, j, begin, end in overlaps(upper.rows(size), lower.rows(size))
    )
