"""Over real gRPC, a device that is slower than planned takes less work, and rounds recover."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small import small_plan
from toy import PROFILE, Watcher

from edgefl.learning.executors import Inline
from edgefl.planning.workloads import AssignConfig, Fleet, assign, assigned, replanner
from edgefl.runtimes.grpc.local import run_here

ROUNDS = 6


class Recorder(Watcher):
    """An observer of a process: it has nothing to tell the others."""

    def export(self) -> dict[str, Any]:
        return {}

    def merge(self, rows: dict[str, Any]) -> None:
        """Nothing to take in."""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "d-psgd"])
def test_a_device_that_is_slower_than_planned_plans_its_work_anew(method):
    profile = PROFILE.model_copy(update={"compute_flops": 1e7})
    plan = small_plan(
        method, 3, rounds=ROUNDS, train={"local_steps": 30}, profiles=[profile] * 4, equal_shares=True
    )
    config = AssignConfig(policy="deadline", replan_above=0.5)
    fleet = Fleet.of(plan.nodes, plan.network, plan.learner)
    found = assign(fleet, config)
    nodes = list(assigned(plan.nodes, found))
    slow = fleet.ids[-1]
    nodes[slow] = replace(nodes[slow], slowdown=3.0)
    plan = replace(plan, nodes=tuple(nodes), replan=replanner(fleet, config, found))
    watchers = [Recorder() for _ in nodes]
    run_here(plan, watchers, Inline(plan.learner), run_id="replan", digest="replan", emulate=True)
    notes = [(node, detail) for w in watchers for _, kind, node, detail in w.events if kind == "replanned"]
    assert {node for node, _ in notes} == {slow}
    assert notes[0][1].endswith(("now 9 steps of 16", "now 10 steps of 16"))
    spans = [
        end - start
        for w in watchers
        for node, kind, start, end, _ in w.spans
        if (node, kind) == (slow, "compute")
    ]
    assert spans[0] == pytest.approx(3 * found.round_s, rel=0.2)
    assert spans[-1] == pytest.approx(found.round_s, rel=0.2)
