"""What a run will take, before it: the programs go through virtual time, and no work is carried out.

Times, traffic and waiting come from the same kernel, links and costs as the run's, so they are the run's as
long as a program does not decide on what training finds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgefl.errors import RunError
from edgefl.experiment.build import Built, build
from edgefl.experiment.config import Experiment
from edgefl.experiment.energy import node_joules
from edgefl.experiment.pace import mean_round_s, mean_rounds, reached
from edgefl.learning.unlearned import Unlearned
from edgefl.nodes.traffic import Traffic
from edgefl.parameters import Vector
from edgefl.planning.show import show_plan
from edgefl.runtimes.outcome import Outcome
from edgefl.runtimes.virtual import VirtualRuntime

ROUNDS = 20
"""Rounds that a preview goes through."""
MOST_EVENTS_S = 1e7
"""Virtual seconds after which a preview gives up on a run that publishes nothing."""


@dataclass(frozen=True)
class NodePreview:
    """One node over the preview. busy_s, sending_s: of its time. idle: share in which it does not compute.

    planned_s: of a round of local training as planned, with the links to itself; None for a node without data
    and for methods that split the model. width: of its
    sub-model; None where none is planned.
    """

    node: int
    role: str
    device: str
    num_examples: int
    batch_size: int
    steps: int
    width: float | None
    busy_s: float
    sending_s: float
    idle: float
    planned_s: float | None
    memory_bytes: int
    sent_bytes: int
    joules: float | None


@dataclass(frozen=True)
class Preview:
    """round_s: mean seconds of a round, as a run's summary has it. spans: (node, kind, start_s, end_s) of the
    first shown_s seconds: two rounds, or one of the slowest device where that is longer. lines: what the
    method's own planner has planned."""

    method: str
    policy: str
    num_rounds: float
    time_s: float
    round_s: float
    idle: float
    nodes: tuple[NodePreview, ...]
    groups: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[int, str, float, float], ...]
    shown_s: float
    lines: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "method": self.method,
            "policy": self.policy,
            "rounds": self.num_rounds,
            "time_s": self.time_s,
            "round_s": self.round_s,
            "idle": self.idle,
            "groups": [list(group) for group in self.groups],
            "nodes": [vars(node) for node in self.nodes],
            "spans": [list(span) for span in self.spans],
            "plan": list(self.lines),
        }


def preview(experiment: Experiment, rounds: int = ROUNDS) -> Preview:
    """Go through the first rounds of an experiment. Raises ConfigError as `build` does, RunError for a run
    that ends before its first round does."""
    built = build(experiment)
    plan = built.plan
    outcome, watcher = go_through(built, rounds)
    if not watcher.published_at:
        raise RunError(f"no round ended in {outcome.time_s:g} s: {outcome.reason}")
    round_s = mean_round_s(watcher.published_at, plan.method.evaluates)
    sent = outcome.traffic.sent_bytes
    nodes = tuple(_node(built, watcher, outcome, i, sent.get(i, 0)) for i in range(len(plan.nodes)))
    working = [node for node in nodes if node.num_examples] or nodes
    # An asynchronous server ends a round with each report: its rounds are shorter than any device's.
    shown_s = max(2 * round_s, max((node.planned_s or 0.0) for node in nodes))
    return Preview(
        method=plan.method.name,
        policy=experiment.assign.policy,
        num_rounds=mean_rounds(watcher.published_at),
        time_s=outcome.time_s,
        round_s=round_s,
        idle=sum(node.idle for node in working) / len(working),
        nodes=nodes,
        groups=built.assignment.groups,
        spans=tuple(span for span in watcher.spans if span[2] < shown_s),
        shown_s=shown_s,
        lines=tuple(show_plan(built.plan)),
    )


def go_through(built: Built, rounds: int) -> tuple[Outcome, Watcher]:
    """Go through the first rounds of a run in virtual time, without training."""
    limit = min(rounds, built.plan.rounds or rounds)
    plan = replace(built.plan, rounds=limit, time_s=built.plan.time_s or MOST_EVENTS_S)
    watcher = Watcher()
    outcome = VirtualRuntime(plan, watcher, Unlearned(built.learner)).run()
    return outcome, watcher


def _node(built: Built, watcher: Watcher, outcome: Outcome, i: int, sent_bytes: int) -> NodePreview:
    spec, time_s = built.plan.nodes[i], outcome.time_s
    num_examples = 0 if spec.data is None else len(spec.data)
    share = built.assignment.shares.get(i)
    busy_s = float(outcome.busy_s.get(i, 0.0))
    return NodePreview(
        node=i,
        role=spec.role,
        device=spec.profile.name,
        num_examples=num_examples,
        batch_size=spec.workload.batch_size,
        steps=spec.workload.num_steps(num_examples),
        width=spec.workload.width,
        busy_s=busy_s,
        sending_s=watcher.sending_s[i],
        idle=max(0.0, 1 - busy_s / spec.profile.lanes / time_s) if time_s else 0.0,
        planned_s=None if share is None or built.memory is not None else share.total_s,
        memory_bytes=_memory_bytes(built, i),
        sent_bytes=sent_bytes,
        joules=node_joules(spec.profile, time_s, busy_s, outcome.traffic.node_bytes(i)),
    )


def _memory_bytes(built: Built, i: int) -> int:
    """What node i needs at once."""
    if built.memory is not None:
        return built.memory.get(i, 0)
    share = built.assignment.shares.get(i)
    return 0 if share is None else built.fleet.cost(i, share.workload).memory_bytes


class Watcher:
    """An Observer that keeps times and evaluates nothing."""

    every_s: float | None = None

    def __init__(self) -> None:
        self.published_at: dict[int, tuple[float, int]] = {}
        """When each node reached the last step that it published, and which."""
        self.sending_s: defaultdict[int, float] = defaultdict(float)
        self.spans: list[tuple[int, str, float, float]] = []

    def begin(self, traffic: Traffic) -> None:
        """Traffic is the outcome's."""

    def published(self, node: int, time_s: float, step: int, parameters: Vector, part: str | None) -> bool:
        reached(self.published_at, node, time_s, step)
        return False

    def tick(self, time_s: float) -> bool:
        return False

    def recorded(self, node: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Metrics of no training say nothing."""

    def span(self, node: int, kind: str, start_s: float, end_s: float, detail: str) -> None:
        if kind == "send":
            self.sending_s[node] += end_s - start_s
        if len(self.spans) < 100_000:
            self.spans.append((node, kind, start_s, end_s))

    def event(self, time_s: float, kind: str, node: int, detail: str) -> None:
        """Events are the run's."""
