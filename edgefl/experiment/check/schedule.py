"""Schedules of faults: drawn from a seed, within what a method says that it outlives.

A schedule is a list of single faults, so that a failure can be explained by the few that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgefl.keyed import generator
from edgefl.network import NetworkPlan
from edgefl.nodes import Faults
from edgefl.nodes.plan import Crash, FaultPlan, Partition, RunPlan


@dataclass(frozen=True)
class Slow:
    """A node's work takes `factor` times longer."""

    node: int
    factor: float


@dataclass(frozen=True)
class Late:
    """A node's link has this latency; `jitter` reorders what different senders say."""

    node: int
    latency_s: float
    jitter: float


@dataclass(frozen=True)
class Uneven:
    """Every work item's time is multiplied by a log-normal factor of this deviation."""

    compute_jitter: float


Fault = Crash | Partition | Slow | Late | Uneven


@dataclass(frozen=True)
class Schedule:
    """seed: of the run and of what was drawn. detect_s: from a crash until the others hear of it."""

    seed: int
    faults: tuple[Fault, ...] = ()
    detect_s: float = 0.0

    def without(self, index: int) -> Schedule:
        """The same but for one fault."""
        return replace(self, faults=self.faults[:index] + self.faults[index + 1 :])

    def applied(self, plan: RunPlan) -> RunPlan:
        """The plan as this schedule disturbs it; faults of its own are replaced."""
        nodes, access = list(plan.nodes), list(plan.network.access)
        uneven = 0.0
        for fault in self.faults:
            if isinstance(fault, Slow):
                spec = nodes[fault.node]
                nodes[fault.node] = replace(spec, slowdown=spec.slowdown * fault.factor)
            elif isinstance(fault, Late):
                late = {"latency_s": fault.latency_s, "jitter": fault.jitter}
                access[fault.node] = access[fault.node].model_copy(update=late)
            elif isinstance(fault, Uneven):
                uneven = fault.compute_jitter
        network: NetworkPlan = replace(plan.network, access=tuple(access))
        faults = FaultPlan(
            crashes=tuple(f for f in self.faults if isinstance(f, Crash)),
            partitions=tuple(f for f in self.faults if isinstance(f, Partition)),
            detect_s=self.detect_s,
            compute_jitter=uneven,
        )
        return replace(plan, seed=self.seed, nodes=tuple(nodes), network=network, faults=faults)

    def describe(self, plan: RunPlan) -> list[str]:
        """Each fault as a line of text, those with a time in its order."""
        ordered = sorted(self.faults, key=lambda f: getattr(f, "at_s", -1.0))
        lines = [_words(fault, plan) for fault in ordered]
        if any(isinstance(f, Crash) and not f.silent for f in self.faults):
            lines.append(f"a death is noticed after {self.detect_s:.4g} s")
        return lines


def draw(seed: int, plan: RunPlan, tolerates: Faults, whole_s: float) -> Schedule:
    """A schedule for a run that takes whole_s seconds undisturbed, of faults that are tolerated.

    A role that one node has, and half of every other role, never go for good: nothing could be asked of
    what is left. Times are drawn over one and a half times the undisturbed run.
    """
    rng = generator(seed, "fault schedule")
    round_s = whole_s / (plan.rounds or 1)
    faults: list[Fault] = []
    if tolerates.delays and rng.random() < 0.7:
        faults += _delays(rng, plan, round_s)
    if tolerates.partitions and rng.random() < 0.5:
        faults += _partitions(rng, len(plan.nodes), whole_s)
    faults += _crashes(rng, plan, tolerates, whole_s)
    return Schedule(seed, tuple(faults), detect_s=_log_uniform(rng, 0.01, 2.0) * round_s)


def _delays(rng: np.random.Generator, plan: RunPlan, round_s: float) -> list[Fault]:
    n = len(plan.nodes)
    faults: list[Fault] = []
    for node in _some(rng, range(n), n // 2):
        faults.append(Slow(node, round(_log_uniform(rng, 1.1, 10.0), 3)))
    for node in _some(rng, range(n), n):
        jitter = round(float(rng.uniform(0, 0.9)), 3)
        faults.append(Late(node, _log_uniform(rng, 0.001, 0.5) * round_s, jitter))
    if rng.random() < 0.5:
        faults.append(Uneven(round(float(rng.uniform(0.05, 0.5)), 3)))
    return faults


def _partitions(rng: np.random.Generator, n: int, whole_s: float) -> list[Fault]:
    faults: list[Fault] = []
    for _ in range(int(rng.integers(1, 3)) if n > 1 else 0):
        apart = rng.choice(n, int(rng.integers(1, n)), replace=False)
        at_s, for_s = float(rng.uniform(0, 1.5)) * whole_s, _log_uniform(rng, 0.01, 0.5) * whole_s
        faults.append(Partition(frozenset(int(i) for i in apart), at_s, for_s))
    return faults


def _crashes(rng: np.random.Generator, plan: RunPlan, tolerates: Faults, whole_s: float) -> list[Fault]:
    def at_s() -> float:
        return float(rng.uniform(0, 1.5)) * whole_s

    faults: list[Fault] = []
    spared = set(range(len(plan.nodes)))
    if tolerates.crashes or tolerates.silence:
        for role in plan.method.roles:
            ids = plan.ids(role)
            for node in _some(rng, ids, len(ids) // 2) if rng.random() < 0.6 else []:
                silent = tolerates.silence and (not tolerates.crashes or rng.random() < 0.3)
                faults.append(Crash(node, at_s(), None, silent))
                spared.discard(node)
    if tolerates.returns and rng.random() < 0.7:
        for node in _some(rng, sorted(spared), max(1, len(spared) // 2)):
            for _ in range(int(rng.integers(1, 3))):
                faults.append(Crash(node, at_s(), _log_uniform(rng, 0.01, 0.7) * whole_s))
    return faults


def _some(rng: np.random.Generator, ids: Sequence[int], most: int) -> list[int]:
    """0 to `most` of `ids`, ascending."""
    count = int(rng.integers(0, most + 1))
    return sorted(int(i) for i in rng.choice(np.asarray(ids), count, replace=False)) if count else []


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return math.exp(float(rng.uniform(math.log(low), math.log(high))))


def _words(fault: Fault, plan: RunPlan) -> str:
    if isinstance(fault, Crash):
        ends = "for good" if fault.down_s is None else f"and returns {fault.down_s:.4g} s later"
        unheard = ", and nobody is told" if fault.silent else ""
        return f"{plan.name(fault.node)} dies at {fault.at_s:.4g} s {ends}{unheard}"
    if isinstance(fault, Partition):
        apart = ", ".join(map(str, sorted(fault.nodes)))
        return f"nodes {apart} are cut off at {fault.at_s:.4g} s for {fault.for_s:.4g} s"
    if isinstance(fault, Slow):
        return f"{plan.name(fault.node)} works {fault.factor:g} times slower"
    if isinstance(fault, Late):
        return f"{plan.name(fault.node)} has a latency of {fault.latency_s:.4g} s, jitter {fault.jitter:g}"
    return f"work takes an uneven time (deviation {fault.compute_jitter:g})"
