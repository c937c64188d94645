"""Pipelines: stages, replicas, schedules, and what a step takes.

Source: DAPPLE, Fan et al. 2021 (https://arxiv.org/abs/2007.01045): the latency model, replicated stages, the
early backward schedule; GPipe, Huang et al. 2019 (https://arxiv.org/abs/1811.06965): all forwards, then all
backwards. A plan says which blocks a stage has, which devices replicate it, and which rows of each
micro-batch a replica takes. The schedule of each device is fixed in advance.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

from edgefl.planning.simulate import Compute, Instruction, Links, Receive, Run, Send, simulate

Policy = Literal["PA", "PB", "gpipe"]
PASS_HEADER_BYTES, RING_HEADER_BYTES = 195, 121
"""Of a message between stages, and around a ring, about as measured: they count where data is few."""


class Costs(Protocol):
    """What blocks cost on devices; rows: examples of a micro-batch."""

    num_layers: int

    def forward_s(self, first: int, last: int, device: int, rows: int) -> float: ...
    def backward_s(self, first: int, last: int, device: int, rows: int) -> float: ...
    def cut_bytes(self, layer: int, rows: int) -> float:
        """What crosses the cut before `layer`, one way."""
        ...

    def parameter_bytes(self, first: int, last: int) -> float: ...
    def fixed_bytes(self, first: int, last: int, rows: int) -> float:
        """Memory however many micro-batches are open: parameters, gradients, the optimiser's state, an older
        version, and the values of the one pass under way where none are kept."""
        ...

    def kept_bytes(self, first: int, last: int, rows: int) -> float:
        """Memory of one micro-batch between its two passes."""
        ...

    def memory_bytes(self, device: int) -> float: ...
    def speed(self, device: int) -> float:
        """How fast it is compared with others, in any unit."""
        ...


@dataclass(frozen=True)
class Stage:
    """Blocks first .. last - 1 on these devices; shares: of a micro-batch's rows, by replica, in any unit."""

    first: int
    last: int
    devices: tuple[int, ...]
    shares: tuple[float, ...]

    def rows(self, size: int) -> tuple[tuple[int, int], ...]:
        """The rows (begin, end) of a micro-batch of `size` that each replica takes: consecutive ones."""
        return row_bounds(size, self.shares)


@dataclass(frozen=True)
class PipelinePlan:
    """stages in order. batch: rows of a global batch, in num_micro micro-batches. warmup: K_i by stage."""

    stages: tuple[Stage, ...]
    batch: int
    num_micro: int
    policy: Policy
    warmup: tuple[int, ...]
    chunk: int | None = None
    """gpipe: micro-batches in memory at once; a drain after so many."""

    @cached_property
    def members(self) -> tuple[int, ...]:
        """All devices that take part, ascending."""
        return tuple(sorted(d for stage in self.stages for d in stage.devices))

    def place(self, device: int) -> tuple[int, int] | None:
        """(stage, replica) of a device; None for one that is left out."""
        for s, stage in enumerate(self.stages):
            if device in stage.devices:
                return s, stage.devices.index(device)
        return None

    @cached_property
    def keepers(self) -> dict[int, int]:
        """Who can keep a copy of a stage that one device alone holds, by that device: the first device of the
        next stage, for the last stage of the one before. None for a single stage."""
        found = {}
        for s, stage in enumerate(self.stages):
            beside = self.stages[s + 1 : s + 2] or self.stages[s - 1 : s]
            if len(stage.devices) == 1 and beside:
                found[stage.devices[0]] = beside[0].devices[0]
        return found

    def without(self, lost: Collection[int]) -> PipelinePlan | None:
        """The stages with the devices that are left of each; None where one has none left. The warm-up depths
        are still those of all."""
        stages = []
        for stage in self.stages:
            left = [(d, w) for d, w in zip(stage.devices, stage.shares, strict=True) if d not in lost]
            if not left:
                return None
            devices, shares = zip(*left, strict=True)
            stages.append(replace(stage, devices=devices, shares=shares))
        return replace(self, stages=tuple(stages))

    def micro_bounds(self, batch: int) -> tuple[tuple[int, int], ...]:
        """Where each micro-batch of a batch of so many rows begins and ends."""
        return tuple(
            (m * batch // self.num_micro, (m + 1) * batch // self.num_micro) for m in range(self.num_micro)
        )

    def order(self, stage: int) -> list[tuple[Literal["F", "B"], int]]:
        """The passes of a stage in their order: forward or backward, of which micro-batch."""
        if self.policy == "gpipe":
            return gpipe_order(self.num_micro, self.chunk or self.num_micro)
        return early_backward_order(self.num_micro, self.warmup[stage])

    def describe(self) -> str:
        """The plan in a line: blocks and devices of each stage."""
        parts = [f"blocks {s.first}:{s.last} on {', '.join(map(str, s.devices))}" for s in self.stages]
        return f"{'; '.join(parts)}; {self.num_micro} micro-batches, {self.policy} {self.warmup}"


def row_bounds(size: int, shares: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Consecutive ranges, proportional to the shares by largest remainder, no range empty while rows last.

    >>> row_bounds(8, (1.0, 2.0, 1.0)), row_bounds(16, (1.0, 99.0))
    (((0, 2), (2, 6), (6, 8)), ((0, 1), (1, 16)))
    """
    n, total = len(shares), sum(shares)
    exact = [size * share / total for share in shares]
    counts = [int(e) for e in exact]
    for i in sorted(range(n), key=lambda i: (counts[i] - exact[i], i))[: size - sum(counts)]:
        counts[i] += 1
    for i in range(n):
        if not counts[i] and max(counts) > 1:
            counts[counts.index(max(counts))] -= 1
            counts[i] = 1
    bounds, at = [], 0
    for count in counts:
        bounds.append((at, at + count))
        at += count
    return tuple(bounds)


def early_backward_order(num_micro: int, warmup: int) -> list[tuple[Literal["F", "B"], int]]:
    """`warmup` forwards, then backward and forward in turn, then the backwards that are left."""
    order: list[tuple[Literal["F", "B"], int]] = [("F", m) for m in range(min(warmup, num_micro))]
    for m in range(num_micro):
        order.append(("B", m))
        if m + warmup < num_micro:
            order.append(("F", m + warmup))
    return order


def gpipe_order(num_micro: int, chunk: int) -> list[tuple[Literal["F", "B"], int]]:
    """All forwards, then all backwards from the last one on; in rounds of `chunk`, what memory holds."""
    order: list[tuple[Literal["F", "B"], int]] = []
    for begin in range(0, num_micro, chunk):
        batches = range(begin, min(begin + chunk, num_micro))
        order += [("F", m) for m in batches]
        order += [("B", m) for m in reversed(batches)]
    return order


def overlaps(
    upper: Sequence[tuple[int, int]], lower: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int, int]]:
    """(i, j, begin, end): the rows that range i of `upper` and range j of `lower` both hold."""
    found = []
    for i, (a, b) in enumerate(upper):
        for j, (c, d) in enumerate(lower):
            if max(a, c) < min(b, d):
                found.append((i, j, max(a, c), min(b, d)))
    return found


def instructions(plan: PipelinePlan, costs: Costs) -> dict[int, list[Instruction]]:
    """One step of the plan, by device: the very passes and messages of the methods that carry it out."""
    lists: dict[int, list[Instruction]] = {}
    for s, stage in enumerate(plan.stages):
        for r, device in enumerate(stage.devices):
            out = lists[device] = []
            for kind, m in plan.order(s):
                begin, end = plan.micro_bounds(plan.batch)[m]
                _pass(plan, costs, s, r, kind, m, end - begin, out)
            out += _all_reduce(stage, r, costs.parameter_bytes(stage.first, stage.last))
    return lists


def _pass(
    plan: PipelinePlan, costs: Costs, s: int, r: int, kind: str, m: int, size: int, out: list[Instruction]
) -> None:
    """One pass of one micro-batch at replica r of stage s."""
    stage = plan.stages[s]
    device = stage.devices[r]
    a, b = stage.rows(size)[r]
    if a == b:
        return
    comes, goes = (s - 1, s + 1) if kind == "F" else (s + 1, s - 1)
    if 0 <= comes < len(plan.stages):
        out += [Receive(i, (kind, m)) for i, _, _ in _shared(plan.stages[comes], stage, r, size)]
    seconds = (costs.forward_s if kind == "F" else costs.backward_s)(stage.first, stage.last, device, b - a)
    out.append(Compute(seconds, (kind, m)))
    if 0 <= goes < len(plan.stages):
        layer = stage.last if kind == "F" else stage.first
        for to, begin, end in _shared(plan.stages[goes], stage, r, size):
            out.append(Send(to, (kind, m), costs.cut_bytes(layer, end - begin) + PASS_HEADER_BYTES, kind))


def _shared(other: Stage, stage: Stage, r: int, size: int) -> list[tuple[int, int, int]]:
    """(device of the other stage, begin, end): the rows that replica r of a stage shares with it."""
    return [
        (other.devices[i], begin, end)
        for i, j, begin, end in overlaps(other.rows(size), stage.rows(size))
        if j == r
    ]


def _all_reduce(stage: Stage, r: int, size_bytes: float) -> list[Instruction]:
    """The ring over the replicas: 2 (n - 1) steps of a chunk each."""
    n = len(stage.devices)
    out: list[Instruction] = []
    for step in range(2 * (n - 1)):
        out.append(
            Send(stage.devices[(r + 1) % n], ("ring", step), size_bytes / n + RING_HEADER_BYTES, "ring")
        )
        out.append(Receive(stage.devices[r - 1], ("ring", step)))
    return out


def simulated(plan: PipelinePlan, costs: Costs, links: Links) -> Run:
    """One step in virtual time."""
    return simulate(instructions(plan, costs), links)


# --- the latency model --------------------------------------------------------------------------------------


def latency_s(plan: PipelinePlan, costs: Costs, links: Links) -> float:
    """L = Tw + Ts + Te of the paper: an estimate of a step, from below where transfers are free.

    Tw: the forwards up to the pivot stage Q; Ts: M - 1 passes both ways at Q; Te: what is left after them,
    all-reduces included. Transfers between stages count as stages.
    """
    forward, backward, reduce_s = _model_stages(plan, costs, links)
    Q, M = _pivot(forward, backward, plan.num_micro), plan.num_micro
    Tw = sum(forward[: Q + 1])
    Ts = (M - 1) * (forward[Q] + backward[Q])
    Te = max(
        reduce_s[s] + (sum(backward[s : Q + 1]) if s <= Q else -sum(backward[Q + 1 : s + 1]))
        for s in range(len(forward))
    )
    return Tw + Ts + Te


def longest_stage_s(plan: PipelinePlan, costs: Costs, links: Links) -> float:
    """Both passes of a micro-batch, or its share of an all-reduce, where that takes longest.

    Source: the planner of PipeDream, Narayanan et al. 2019 (https://doi.org/10.1145/3341301.3359646).
    """
    stages = zip(*_model_stages(plan, costs, links), strict=True)
    return max(max(f + b, reduce_s / plan.num_micro) for f, b, reduce_s in stages)


def _pivot(forward: Sequence[float], backward: Sequence[float], M: int) -> int:
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    Q = len(both) - 1
    for s in range(Q - 1, -1, -1):
        if (M - 1) * both[s] > (M - 1) * both[Q] + sum(both[s + 1 : Q]):
            Q = s
    return Q


def _model_stages(
    plan: PipelinePlan, costs: Costs, links: Links
) -> tuple[list[float], list[float], list[float]]:
    """F, B and all-reduce seconds of compute and transfer stages in order, for a full micro-batch."""
    size = -(-plan.batch // plan.num_micro)
    forward: list[float] = []
    backward: list[float] = []
    reduce_s: list[float] = []
    for s, stage in enumerate(plan.stages):
        if s:
            seconds = _transfer_s(plan.stages[s - 1], stage, size, costs, links)
            forward.append(seconds)
            backward.append(seconds)
            reduce_s.append(0.0)
        rows = [b - a for a, b in stage.rows(size)]
        pairs = list(zip(stage.devices, rows, strict=True))
        forward.append(max(costs.forward_s(stage.first, stage.last, d, n) for d, n in pairs))
        backward.append(max(costs.backward_s(stage.first, stage.last, d, n) for d, n in pairs))
        reduce_s.append(_ring_s(stage, costs, links))
    return forward, backward, reduce_s


def _transfer_s(upper: Stage, lower: Stage, size: int, costs: Costs, links: Links) -> float:
    worst = 0.0
    for i, j, begin, end in overlaps(upper.rows(size), lower.rows(size)):
        a, b = upper.devices[i], lower.devices[j]
        rate = links.rate(a, b)
        worst = max(
            worst, costs.cut_bytes(lower.first, end - begin) / rate + links.latency_s[a] + links.latency_s[b]
        )
    return worst


def _ring_s(stage: Stage, costs: Costs, links: Links) -> float:
    n = len(stage.devices)
    if n == 1:
        return 0.0
    pairs = [(stage.devices[r - 1], stage.devices[r]) for r in range(n)]
    rate = min(links.rate(a, b) for a, b in pairs)
    wait_s = max(links.latency_s[a] + links.latency_s[b] for a, b in pairs)
    return 2 * (n - 1) * (costs.parameter_bytes(stage.first, stage.last) / n / rate + wait_s)
