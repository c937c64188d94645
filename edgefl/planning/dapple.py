"""DAPPLE's planner: stage bounds, replicas and their devices, warm-up depths.

Source: Fan et al. 2021 (https://arxiv.org/abs/2007.01045) and its public planner. Choices: devices stand
along the chain in descending or ascending speed; small cases are enumerated, larger ones take the public
planner's families of candidates; where some pairs have faster links than others, the public planner's three
placements on machines come on top (planning.machines); candidates are ranked by the latency model, the best
are simulated, and the fastest wins; ties go to fewer stages, then smaller cuts, then the PA policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from edgefl.planning.machines import lines_of_machines, placed_on_machines
from edgefl.planning.pipeline import Costs, PipelinePlan, Policy, Stage, latency_s, longest_stage_s, simulated
from edgefl.planning.simulate import Links

MOST_LAYERS, MOST_DEVICES = 12, 8
"""Up to these all plans are enumerated."""
SIMULATE_ALL, SIMULATED = 128, 20
"""So many candidates are all simulated; of more, so many of the best by the latency model."""
Bounds = tuple[tuple[int, int], ...]


class NoPlan(ValueError):
    """No plan fits the devices' memory. device: the one that lacks most, by its share, in the plan that lacks
    least; needed, has: its bytes, for one micro-batch."""

    def __init__(self, device: int, needed: float, has: float) -> None:
        self.device, self.needed, self.has = device, needed, has
        super().__init__(f"no plan fits the memory: device {device} needs {needed:.0f} bytes, has {has:.0f}")


@dataclass(frozen=True)
class Planned:
    """A plan and its simulated seconds per step."""

    plan: PipelinePlan
    step_s: float


def plan_pipeline(
    costs: Costs,
    links: Links,
    devices: Sequence[int],
    batch: int,
    num_micro: int,
    policies: Sequence[Policy] = ("PA", "PB"),
    *,
    balanced: bool = False,
) -> Planned:
    """The fastest plan for a global batch of `batch` rows in `num_micro` micro-batches.

    balanced: the plan whose longest stage is shortest, whatever a step takes.
    Raises NoPlan when no plan fits.
    """
    candidates = list(shapes(costs, devices, batch, num_micro, links))
    found = [p for p in candidates if fits(p, costs)]
    if not found:
        raise NoPlan(*min((_tightest(p, costs) for p in candidates), key=lambda one: one[1] / one[2]))
    if balanced:
        kept = [min(found, key=lambda p: (longest_stage_s(p, costs, links), *_tie(p)))]
    else:
        found.sort(key=lambda p: (latency_s(p, costs, links), *_tie(p)))
        kept = found if len(found) <= SIMULATE_ALL else found[:SIMULATED]
    best: tuple[tuple[float, int, Bounds, int], PipelinePlan] | None = None
    for shape in kept:
        for rank, policy in enumerate(policies):
            plan = with_policy(shape, costs, policy)
            seconds = simulated(plan, costs, links).makespan_s
            key = (seconds, *_tie(plan), rank)
            if best is None or key < best[0]:
                best = key, plan
    assert best is not None
    return Planned(best[1], best[0][0])


def _tie(plan: PipelinePlan) -> tuple[int, Bounds]:
    return len(plan.stages), tuple((s.last, len(s.devices)) for s in plan.stages)


def shapes(
    costs: Costs, devices: Sequence[int], batch: int, num_micro: int, links: Links
) -> Iterator[PipelinePlan]:
    """Candidate plans, each once, with the PA policy; replicas are at most the rows of a micro-batch."""
    fast_first = sorted(devices, key=lambda d: (-costs.speed(d), d))
    lines = [fast_first]
    if costs.speed(fast_first[0]) != costs.speed(fast_first[-1]):
        lines.append(fast_first[::-1])
    lines += lines_of_machines(costs, links, devices)
    found: dict[tuple[Stage, ...], None] = {}
    for line in lines:
        for bounds in _bounds(costs, line, batch // num_micro, links):
            found[_placed(bounds, line, costs)] = None
    found |= dict.fromkeys(placed_on_machines(costs, links, devices, batch // num_micro))
    for stages in found:
        if max(len(s.devices) for s in stages) <= batch // num_micro:
            yield with_policy(PipelinePlan(stages, batch, num_micro, "PA", ()), costs, "PA")


def _bounds(costs: Costs, line: Sequence[int], size: int, links: Links) -> Iterator[Bounds]:
    """((end of stage, replicas), ...): all of them for small cases, else the families and the search."""
    N, G = costs.num_layers, len(line)
    if N <= MOST_LAYERS and G <= MOST_DEVICES:
        yield from all_bounds(N, G)
        return
    yield from (((N, replicas),) for replicas in range(1, G + 1))
    yield from (((first, r), (N, G - r)) for first in range(1, N) for r in range(1, G))
    for S in range(2, min(N, G) + 1):
        ends = [round(N * (s + 1) / S) for s in range(S)]
        yield from (tuple((end, r) for end in ends) for r in range(1, G // S + 1))
    yield from _balanced(costs, line, size, links)


def all_bounds(N: int, G: int) -> Iterator[Bounds]:
    """All ways to cut N layers into stages on at most G devices, C(N + G - 1, G - 1) of them."""
    for S in range(1, min(N, G) + 1):
        for cuts in combinations(range(1, N), S - 1):
            # S rising marks from 1 to G: replica counts that use at most G devices.
            for marks in combinations(range(1, G + 1), S):
                counts = [b - a for a, b in zip((0, *marks), marks, strict=False)]
                yield tuple(zip((*cuts, N), counts, strict=True))


def _balanced(costs: Costs, line: Sequence[int], size: int, links: Links) -> Iterator[Bounds]:
    """The dynamic programme over (first j layers, m devices): least longest stage, replicas or transfer time.

    It knows neither all-reduces nor the time to fill the pipeline, which is why it is not alone.
    """
    N, G = costs.num_layers, len(line)
    rate = min((links.rate(a, b) for a in line for b in line if a != b), default=math.inf)
    best: dict[tuple[int, int], tuple[float, Bounds]] = {(0, 0): (0.0, ())}
    for j in range(1, N + 1):
        for m in range(1, G + 1):
            found: list[tuple[float, Bounds]] = []
            for (k, used), (value, bounds) in best.items():
                if k >= j or used >= m:
                    continue
                slowest = max(line[used:m], key=lambda d: -costs.speed(d))
                seconds = costs.forward_s(k, j, slowest, size) + costs.backward_s(k, j, slowest, size)
                transfer_s = 2 * costs.cut_bytes(k, size) / rate if k else 0.0
                found.append((max(value, seconds / (m - used), transfer_s), (*bounds, (j, m - used))))
            if found:
                best[j, m] = min(found)
    yield from (bounds for (j, _), (_, bounds) in best.items() if j == N)


def _placed(bounds: Bounds, line: Sequence[int], costs: Costs) -> tuple[Stage, ...]:
    stages, first, at = [], 0, 0
    for last, count in bounds:
        members = tuple(line[at : at + count])
        stages.append(Stage(first, last, members, tuple(costs.speed(d) for d in members)))
        first, at = last, at + count
    return tuple(stages)


# --- memory and warm-up -------------------------------------------------------------------------------------


def depth(stage: Stage, costs: Costs, size: int) -> int:
    """D: micro-batches of `size` rows that fit between their two passes, where there is least room."""
    fitting = []
    for device, (a, b) in zip(stage.devices, stage.rows(size), strict=True):
        room = costs.memory_bytes(device) - costs.fixed_bytes(stage.first, stage.last, b - a)
        kept = costs.kept_bytes(stage.first, stage.last, b - a)
        fitting.append(int(room // kept) if kept and room >= 0 else (1 << 30 if room >= 0 else 0))
    return min(fitting)


def fits(plan: PipelinePlan, costs: Costs) -> bool:
    """Whether each device has room for its stage and one micro-batch."""
    size = -(-plan.batch // plan.num_micro)
    return all(depth(stage, costs, size) >= 1 for stage in plan.stages)


def _tightest(plan: PipelinePlan, costs: Costs) -> tuple[int, float, float]:
    """The device that lacks most for its stage and one micro-batch: it, what it needs and what it has."""
    size = -(-plan.batch // plan.num_micro)
    found = []
    for stage in plan.stages:
        for device, (a, b) in zip(stage.devices, stage.rows(size), strict=True):
            at_least = costs.fixed_bytes(stage.first, stage.last, b - a)
            needed = at_least + costs.kept_bytes(stage.first, stage.last, b - a)
            found.append((device, needed, costs.memory_bytes(device)))
    return max(found, key=lambda one: one[1] / one[2])


def with_policy(plan: PipelinePlan, costs: Costs, policy: Policy) -> PipelinePlan:
    """The plan with the warm-up depths of a policy.

    PA: K_i = min(S - i, D); PB: min(2 (S - i) - 1, D); at most M. gpipe: all, in rounds of what fits.
    """
    S, M, size = len(plan.stages), plan.num_micro, -(-plan.batch // plan.num_micro)
    depths = [depth(stage, costs, size) for stage in plan.stages]
    if policy == "gpipe":
        chunk = max(1, min(M, *depths))
        return replace(plan, policy=policy, warmup=(chunk,) * S, chunk=chunk)
    wanted = [S - i if policy == "PA" else 2 * (S - i) - 1 for i in range(S)]
    warmup = tuple(max(1, min(K, D, M)) for K, D in zip(wanted, depths, strict=True))
    return replace(plan, policy=policy, warmup=warmup, chunk=None)
