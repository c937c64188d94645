"""The butterfly all-reduce: how the load is split, and what is left when members vanish."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from toy import access, run_toy

from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.patterns.butterfly import (
    Difference,
    Part,
    butterfly_mean,
    load_split,
    part_bounds,
    split_time_s,
)


@pytest.mark.parametrize(
    ("bandwidths", "shares", "time_s", "equal_s"),
    [
        ((1, 1, 10), (0, 0, 1), 1.0, 4 / 3),
        ((1, 2, 3, 4), (0, 0.2, 0.4, 0.4), 1.0, 1.5),
        ((5, 5, 5, 5, 50), (0, 0, 0, 0, 1), 0.2, 0.32),
        ((3, 3, 3, 3), (0.25, 0.25, 0.25, 0.25), 2 * 3 / 4 / 3, 2 * 3 / 4 / 3),
        ((1, 3), (0.25, 0.75), 1.0, 1.0),
    ],
)
def test_the_load_is_split_by_bandwidth(bandwidths, shares, time_s, equal_s):
    g = len(bandwidths)
    assert load_split(bandwidths) == pytest.approx(shares, abs=1e-12)
    assert split_time_s(bandwidths, load_split(bandwidths), 1.0) == pytest.approx(time_s, abs=1e-12)
    assert split_time_s(bandwidths, [1 / g] * g, 1.0) == pytest.approx(equal_s, abs=1e-12)


def least_time(bandwidths):
    """The linear program that hivemind solves: variables w_1 .. w_g and T."""
    g = len(bandwidths)
    b = np.array(bandwidths)
    rows = np.zeros((g, g + 1))
    rows[np.arange(g), np.arange(g)] = (g - 2) / b
    rows[:, -1] = -1
    solved = linprog(
        [0] * g + [1],
        A_ub=rows,
        b_ub=-1 / b,
        A_eq=[[1] * g + [0]],
        b_eq=[1],
        bounds=[(0, 1)] * g + [(0, None)],
    )
    return solved.fun


def test_the_slowest_member_takes_the_least_time_that_a_linear_program_finds():
    rng = np.random.default_rng(0)
    for _ in range(50):
        bandwidths = rng.lognormal(0, 1, rng.integers(3, 9)).tolist()
        shares = load_split(bandwidths)
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0
        assert split_time_s(bandwidths, shares, 1.0) == pytest.approx(least_time(bandwidths), rel=1e-6)


def test_who_has_no_bandwidth_reduces_nothing():
    assert load_split([0, 1, 1]) == [0, 0.5, 0.5]


def test_parts_cover_the_vector_in_order():
    assert part_bounds(7, [0.5, 0.0, 0.5]) == [(0, 4), (4, 4), (4, 7)]
    assert [e - b for b, e in part_bounds(10, [1 / 3] * 3)] == [4, 3, 3]


async def member(log, members, shares, node):
    values = torch.arange(8, dtype=torch.float32) + 100 * node.id
    log[node.id] = values
    return await butterfly_mean(node, members, values, shares, group=7, timeout_s=10.0)


async def silent(node):
    await node.sleep(1000.0)


def run_group(programs, **plan):
    return run_toy(programs, [Part, Difference], access=access(1e3), **plan)


def test_without_failures_all_hold_the_mean_and_send_what_the_shares_say():
    log = {}
    members, shares = [2, 0, 3, 1], [0.25] * 4
    outcome = run_group([partial(member, log, members, shares)] * 4)
    mean = torch.stack(list(log.values())).mean(0)
    for result in outcome.results.values():
        assert torch.allclose(result, mean, rtol=0, atol=1e-4)
    assert outcome.traffic.payload_bytes == 4 * 2 * 3 / 4 * 8 * 4


def test_a_sender_that_says_nothing_is_left_out_and_its_part_stays_as_it_was():
    """Member 2 lives, and is silent: parts are means over those heard, part 2 is each one's own."""
    log = {}
    members, shares = [0, 1, 2, 3], [0.25] * 4
    talks = partial(member, log, members, shares)
    outcome = run_group([talks, talks, silent, talks], ends_with=[0, 1, 3])
    heard = torch.stack([log[j] for j in (0, 1, 3)])
    for j in (0, 1, 3):
        result = outcome.results[j]
        assert torch.allclose(result[:4], heard.mean(0)[:4], atol=1e-4)
        assert torch.allclose(result[6:], heard.mean(0)[6:], atol=1e-4)
        assert torch.equal(result[4:6], log[j][4:6])
    assert outcome.time_s <= 20.1


def test_a_member_that_is_gone_is_given_up_at_once():
    log = {}
    members, shares = [0, 1, 2, 3], [0.25] * 4
    faults = FaultPlan(crashes=(Crash(2, at_s=0.0),), detect_s=0.5)
    outcome = run_group([partial(member, log, members, shares)] * 4, faults=faults)
    assert sorted(outcome.results) == [0, 1, 3] and outcome.time_s < 1.0
    heard = torch.stack([log[j] for j in (0, 1, 3)])
    assert torch.allclose(outcome.results[0][:4], heard.mean(0)[:4], atol=1e-4)
    assert torch.equal(outcome.results[0][4:6], log[0][4:6])
