"""Stages on machines: placements by hand, and plans for fleets whose links are not alike."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from test_planning_pipeline import Table, links

from edgefl.planning.dapple import all_bounds, plan_pipeline, with_policy
from edgefl.planning.machines import append_first, fresh_first, machines_of, placed_on_machines, scatter_first
from edgefl.planning.pipeline import PipelinePlan, Stage, simulated

TWO = ((0, 2), (1, 3))
"""Two machines of two devices each."""


def between(machines, n, fast, slow, model="separate"):
    """Links that are fast within a machine and slow between machines."""
    home = {d: m for m, machine in enumerate(machines) for d in machine}
    caps = {(a, b): slow for a in range(n) for b in range(n) if a != b and home[a] != home[b]}
    return replace(links(n, fast, model), caps=caps)


def test_machines_are_what_fast_links_join():
    assert machines_of(between(TWO, 4, 1e6, 1e4), range(4)) == [[0, 2], [1, 3]]
    assert machines_of(between(((0, 1, 4), (2, 3)), 5, 1e6, 1e4), range(5)) == [[0, 1, 4], [2, 3]]
    assert machines_of(links(3, 1e6), range(3)) == [[0], [1], [2]]


def test_placements_by_hand():
    free, used = [[0, 1], [2, 3, 4], [5]], [False, True, False]
    assert list(fresh_first(free, used)) == [0, 1, 5, 2, 3, 4]
    assert list(append_first(free, used)) == [2, 3, 4, 0, 1, 5]
    assert list(scatter_first(free, used)) == [0, 2, 5, 1, 3, 4]


def table(seed, layers, n):
    rng = np.random.default_rng(seed)
    forward = tuple(rng.uniform(0.5, 2, layers))
    sizes = tuple(rng.uniform(0, 3e5, layers)), tuple(rng.uniform(0, 3e5, layers - 1))
    return Table(forward, tuple(2 * f for f in forward), *sizes, 60, dict.fromkeys(range(n), 1.0))


def placed(bounds, line):
    stages, first, at = [], 0, 0
    for last, count in bounds:
        stages.append(Stage(first, last, tuple(line[at : at + count]), (1.0,) * count))
        first, at = last, at + count
    return tuple(stages)


def fastest_s(costs, net, lines):
    """Of all cuts and replica counts, along any of the lines of devices."""
    plans = (
        with_policy(PipelinePlan(placed(bounds, line), 480, 8, "PA", ()), costs, policy)
        for line in lines
        for bounds in all_bounds(costs.num_layers, len(line))
        for policy in ("PA", "PB")
    )
    return min(simulated(plan, costs, net).makespan_s for plan in plans)


@pytest.mark.parametrize("seed", range(6))
def test_with_machines_the_plan_is_near_the_best_of_all_placements(seed):
    costs, net = table(seed, 3, 4), between(TWO, 4, 1e6, 1e5)
    found = plan_pipeline(costs, net, range(4), 480, 8)
    best = fastest_s(costs, net, list(itertools.permutations(range(4))))
    flat = fastest_s(costs, net, [range(4)])
    assert best - 1e-9 <= found.step_s <= min(1.05 * best, flat + 1e-9)


def test_replicas_of_a_stage_stay_on_one_machine_where_its_gradients_are_large():
    """In the order of ids, every stage of two would reach over both machines."""
    costs = Table((1.0, 1.0), (2.0, 2.0), (4e6, 4e6), (1e3,), 60, dict.fromkeys(range(4), 1.0))
    found = plan_pipeline(costs, between(TWO, 4, 1e7, 1e5), range(4), 480, 8).plan
    assert {frozenset(stage.devices) for stage in found.stages} == set(map(frozenset, TWO))


def test_a_flat_network_has_no_machines_to_place_on():
    assert list(placed_on_machines(table(0, 3, 4), links(4, 1e6), range(4), 60)) == []
