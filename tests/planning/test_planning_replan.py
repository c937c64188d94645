"""A device that slows down in mid-run: with [assign] replan_above it takes less work, and rounds recover."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small import small_plan
from toy import PROFILE, Watcher

from edgefl.learning.executors import make_executor
from edgefl.network import Trace
from edgefl.planning.workloads import AssignConfig, Fleet, assign, assigned, replanner
from edgefl.runtimes.virtual import VirtualRuntime

ROUNDS = 12


def watched(method, replan_above):
    """One of three devices is left a third of its processor from the middle of the run on."""
    profile = PROFILE.model_copy(update={"compute_flops": 2e7})
    plan = small_plan(
        method, 3, rounds=ROUNDS, train={"local_steps": 30}, profiles=[profile] * 4, equal_shares=True
    )
    config = AssignConfig(policy="deadline", replan_above=replan_above)
    fleet = Fleet.of(plan.nodes, plan.network, plan.learner)
    found = assign(fleet, config)
    nodes = list(assigned(plan.nodes, found))
    slow_from_s = ROUNDS / 2 * found.round_s
    nodes[2] = replace(nodes[2], speed=Trace((0.0, slow_from_s), (1.0, 1 / 3)))
    plan = replace(plan, nodes=tuple(nodes), replan=replanner(fleet, config, found))
    watcher = Watcher()
    VirtualRuntime(plan, watcher, make_executor("inline", plan.learner)).run()
    return found.round_s, watcher


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_a_device_that_slows_down_holds_the_others_up_for_a_round_or_two(method):
    round_s, kept = watched(method, None)
    assert last_round_s(kept) == pytest.approx(3 * round_s, rel=0.1)
    round_s, found = watched(method, 0.2)
    assert last_round_s(found) == pytest.approx(round_s, rel=0.1)
    notes = [(node, detail) for _, kind, node, detail in found.events if kind == "replanned"]
    assert {node for node, _ in notes} == {2}
    assert notes[-1][1].endswith(("now 9 steps of 16", "now 10 steps of 16"))
    assert found.models[-1][1] < 0.75 * kept.models[-1][1]


def last_round_s(watcher):
    ends = [time_s for _, time_s, _, _ in watcher.models]
    return ends[-1] - ends[-2]
