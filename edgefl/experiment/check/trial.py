"""One run under one schedule, and what is to be said of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from edgefl.errors import ProgramFailed, RunError, Stuck
from edgefl.experiment.check.schedule import Late, Schedule
from edgefl.learning.executors import Executor
from edgefl.nodes.handles import Task
from edgefl.nodes.operations import Receive
from edgefl.nodes.plan import Crash, Partition, RunPlan
from edgefl.nodes.traffic import Traffic
from edgefl.parameters import Vector
from edgefl.runtimes.outcome import Outcome
from edgefl.runtimes.tasks import NodeState
from edgefl.runtimes.virtual import VirtualRuntime

MOST_AT_ONCE = 100_000
"""Messages that a program may take at one instant before it is said to spin."""
OVER = "over the bound"
TIME_LIMIT = "time limit"
"""The virtual runtime's own reason."""


@dataclass(frozen=True)
class Bound:
    """Where a run is said to hang. time_s: in virtual time; events: of the virtual clock."""

    time_s: float
    events: int


@dataclass(frozen=True)
class Verdict:
    """How a run ended. kind: finished, stopped, hangs, fails, diverges or breaks (an invariant)."""

    kind: Literal["finished", "stopped", "hangs", "fails", "diverges", "breaks"]
    detail: str
    time_s: float
    events: int = 0

    @property
    def good(self) -> bool:
        return self.kind in ("finished", "stopped")


class _Bounded(VirtualRuntime):
    """Ends a run that makes too many events, or takes messages at one instant without end."""

    bound: Bound
    left_waiting: Mapping[str, str] = {}
    """What each node waited for when the run was ended, by name."""
    _taken_at: tuple[float, int] = (0.0, 0)

    def _resume(self, task: Task[Any], value: Any, error: BaseException | None) -> None:
        super()._resume(task, value, error)
        if self.num_events > self.bound.events:
            self.stop(OVER)

    def end_all(self) -> None:
        self.left_waiting = self.waits()
        super().end_all()

    def _at_hand(self, state: NodeState, op: Receive) -> Any:
        time_s, count = self._taken_at
        count = count + 1 if time_s == self.clock() else 0
        self._taken_at = (self.clock(), count)
        if count > MOST_AT_ONCE:
            raise RunError(f"takes messages at one instant without end, waiting for {op.describe()}")
        return super()._at_hand(state, op)


class _Watch:
    """Looks at every model that is published: is it made of numbers?"""

    every_s: float | None = None

    def __init__(self) -> None:
        self.odd: str | None = None

    def begin(self, traffic: Traffic) -> None:
        """Nothing is kept of the traffic."""

    def published(self, node: int, time_s: float, step: int, parameters: Vector, part: str | None) -> bool:
        if self.odd is None and not bool(torch.isfinite(parameters.values).all()):
            self.odd = f"node {node} published a model that is not finite at {time_s:.4g} s, step {step}"
        return self.odd is not None

    def tick(self, time_s: float) -> bool:
        return False

    def recorded(self, node: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Metrics are not looked at: a void round's loss is no number."""

    def span(self, node: int, kind: str, start_s: float, end_s: float, detail: str) -> None:
        """Spans are not looked at."""

    def event(self, time_s: float, kind: str, node: int, detail: str) -> None:
        """Events are not looked at."""


def bound_of(undisturbed: Verdict, schedule: Schedule) -> Bound:
    """Generous: a hundred times the undisturbed run and its faults, and ten minutes for time-outs."""
    lost_s = sum(f.for_s for f in schedule.faults if isinstance(f, Partition))
    lost_s += sum(f.down_s or 0.0 for f in schedule.faults if isinstance(f, Crash))
    lost_s += sum(f.latency_s for f in schedule.faults if isinstance(f, Late))
    return Bound(600 + 100 * (undisturbed.time_s + lost_s), 100_000 + 200 * undisturbed.events)


def run_trial(plan: RunPlan, executor: Executor | None, schedule: Schedule, bound: Bound) -> Verdict:
    """Run a plan under a schedule and judge the outcome."""
    disturbed = replace(schedule.applied(plan), time_s=bound.time_s)
    watch = _Watch()
    runtime = _Bounded(disturbed, watch, executor)
    runtime.bound = bound

    def verdict(kind: Any, detail: str) -> Verdict:
        return Verdict(kind, detail, runtime.clock(), runtime.num_events)

    try:
        outcome = runtime.run()
    except Stuck as stuck:
        return verdict("hangs", str(stuck))
    except ProgramFailed as failed:
        return verdict("fails", str(failed))
    if watch.odd is not None:
        return verdict("diverges", watch.odd)
    if outcome.reason in (OVER, TIME_LIMIT):
        waits = Stuck(runtime.clock(), runtime.left_waiting)
        return verdict("hangs", f"over {bound.time_s:.4g} s or {bound.events} events; {waits}")
    return _judged(disturbed, outcome, verdict)


def _judged(plan: RunPlan, outcome: Outcome, verdict: Callable[[Any, str], Verdict]) -> Verdict:
    for node, result in outcome.results.items():
        if isinstance(result, Vector) and not bool(torch.isfinite(result.values).all()):
            return verdict("diverges", f"the model of {plan.name(node)} is not finite")
    for check in plan.method.invariants:
        held = check.holds(outcome)
        if held is not True:
            return verdict("breaks", f"{check.name}: {held or 'it does not hold'}")
    return verdict(outcome.status, outcome.reason)
