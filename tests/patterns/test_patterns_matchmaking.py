"""Matchmaking: peers with one key find each other without a coordinator, whoever vanishes meanwhile."""

from __future__ import annotations

from functools import partial

import pytest
from toy import access, run_toy

from edgefl.nodes.plan import Crash, FaultPlan, Partition
from edgefl.patterns.matchmaking import MESSAGES, Accepted, Join, Matchmaker, Refused

LINKS = access(1e6, latency_s=0.005)


async def looks(n, size, window_s, key, start_s, node, more=None):
    """Look once for a group, then go on answering."""
    maker = Matchmaker(node, range(n), request_timeout_s=0.5, **(more or {}))
    await node.sleep(start_s)
    found = await maker.find(key, size, window_s)
    at_s = node.now()
    await node.sleep(20.0 - at_s)
    return found, at_s


def meet(keys, size, *, window_s=1.0, starts=None, **plan):
    n = len(keys)
    programs = [
        partial(looks, n, size, window_s, key, (starts or [0.0] * n)[i]) for i, key in enumerate(keys)
    ]
    return run_toy(programs, MESSAGES, access=LINKS, **plan).results


def groups_of(results):
    return {i: None if found is None else frozenset(found.members) for i, (found, _) in results.items()}


def test_a_full_group_begins_at_once_and_all_know_the_same_of_it():
    results = meet(["a"] * 5, 5)
    groups = [results[i][0] for i in range(5)]
    assert len({(g.id, g.members, g.bandwidths_bytes_per_s, g.weights) for g in groups}) == 1
    assert sorted(groups[0].members) == list(range(5))
    assert sorted(g.index for g in groups) == list(range(5))
    assert all(g.members[g.index] == i for i, g in enumerate(groups))
    assert all(at_s < 0.2 for _, at_s in results.values())  # long before the leader's time is up


def test_members_come_in_an_order_that_differs_from_group_to_group():
    assert len({meet(["a"] * 5, 5, seed=seed)[0][0].members for seed in range(6)}) > 3


def test_only_equal_keys_meet():
    groups = groups_of(meet(["a", "b", "a", "b", "a", "b"], 3))
    assert groups[0] == groups[2] == groups[4] == {0, 2, 4}
    assert groups[1] == groups[3] == groups[5] == {1, 3, 5}


@pytest.mark.parametrize("n", [5, 7])
def test_groups_are_never_larger_than_they_may_be(n):
    groups = groups_of(meet(["a"] * n, 3))
    for i, group in groups.items():
        if group is not None:
            assert i in group and len(group) <= 3 and all(groups[j] == group for j in group)
    assert sum(group is not None for group in groups.values()) >= n - 2


def test_a_smaller_group_begins_when_its_leaders_time_is_up():
    results = meet(["a", "a", "a"], 8, starts=[0.0, 0.3, 0.6])
    assert groups_of(results) == {i: {0, 1, 2} for i in range(3)}
    assert results[0][1] == pytest.approx(1.0, abs=0.05)  # the earliest leads: its window ends first


def test_who_is_alone_gets_nothing_when_its_time_is_up():
    results = meet(["a", "b", "b"], 2)
    assert results[0][0] is None and results[0][1] == pytest.approx(1.0, abs=0.01)


def test_too_few_are_sent_away():
    n = 2
    programs = [partial(looks, n, 4, 1.0, "a", 0.0, more={"min_size": 3}) for _ in range(n)]
    results = run_toy(programs, MESSAGES, access=LINKS).results
    assert groups_of(results) == {0: None, 1: None}


def test_the_earliest_leads_and_followers_are_sent_on_to_it():
    """Node 1 looks before 0 and 2, but they cannot hear of each other at once: chains end at one leader."""
    results = meet(["a"] * 6, 6, starts=[0.05, 0.0, 0.04, 0.03, 0.02, 0.01])
    assert set(groups_of(results).values()) == {frozenset(range(6))}


def test_a_leader_that_dies_is_replaced():
    faults = FaultPlan(crashes=(Crash(0, at_s=0.5),), detect_s=0.1)
    results = meet(["a"] * 4, 8, starts=[0.0, 0.2, 0.2, 0.2], faults=faults)
    assert groups_of(results) == {i: {1, 2, 3} for i in (1, 2, 3)}


def test_a_leader_that_falls_silent_is_given_up():
    faults = FaultPlan(crashes=(Crash(0, at_s=0.5, silent=True),))
    results = meet(["a"] * 4, 8, starts=[0.0, 0.2, 0.2, 0.2], faults=faults)
    assert all(at_s <= 1.0 + 2 * 0.5 + 0.3 for _, at_s in results.values())


@pytest.mark.parametrize("dead", range(4))
def test_whoever_keeps_the_entries_may_die_before_the_search(dead):
    faults = FaultPlan(crashes=(Crash(dead, at_s=0.0),), detect_s=0.1)
    results = meet(["a"] * 4, 4, starts=[1.0] * 4, faults=faults)
    assert set(groups_of(results).values()) == {frozenset(range(4)) - {dead}}


def test_a_partition_costs_a_group_and_no_more():
    faults = FaultPlan(partitions=(Partition(frozenset({0, 1}), 0.0, 3.0),))
    results = meet(["a"] * 4, 4, faults=faults)
    assert all(at_s <= 2.1 for _, at_s in results.values())


async def stranger(answers, node):
    """Asks a peer that looks under another key, one later than itself, and one that does not look."""
    for key, expires_s, at_s in (("b", 99.0, 0.5), ("a", 0.1, 0.0), ("a", 99.0, 1.0)):
        await node.sleep(at_s)
        node.send(0, Join(key, 1, expires_s, 1.0, 1.0))
        m = await node.receive(Accepted, Refused)
        answers.append(getattr(m, "reason", "accepted"))


def test_a_refusal_gives_its_reason():
    answers: list[str] = []
    programs = [partial(looks, 2, 4, 1.0, "a", 0.0), partial(stranger, answers)]
    run_toy(programs, MESSAGES, access=LINKS)
    assert answers == ["another key", "not earlier", "not looking"]
