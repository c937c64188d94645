"""Groups that fire one after the other, and the divisions that they come from."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.patterns.groups import GroupBuffers, divide, divide_by_machine


def fired(buffers):
    return [group.members for group in buffers.fire()]


def test_a_group_fires_when_all_of_its_members_wait():
    buffers = GroupBuffers(range(4))
    buffers.add([2, 0])
    buffers.request(0)
    assert fired(buffers) == []
    buffers.request(2)
    assert fired(buffers) == [[0, 2]] and fired(buffers) == []


def test_overlapping_groups_meet_one_after_the_other():
    buffers = GroupBuffers(range(3))
    buffers.add([0, 1])
    buffers.add([1, 2])
    for w in range(3):
        buffers.request(w)
    (first,) = buffers.fire()
    buffers.done(0, first.id)
    assert fired(buffers) == []
    buffers.done(1, first.id)
    buffers.request(1)
    assert fired(buffers) == [[1, 2]]


def test_a_group_of_one_fires_at_once_and_needs_no_report():
    buffers = GroupBuffers(range(2))
    buffers.add([1])
    buffers.request(1)
    assert fired(buffers) == [[1]] and buffers.is_empty(1)


def test_a_request_with_an_initiator_stays_open_while_others_groups_meet():
    buffers = GroupBuffers(range(3))
    buffers.add([0, 1], initiator=0)
    buffers.add([1, 2], initiator=1)
    for w in range(3):
        buffers.request(w)
    (first,) = buffers.fire()
    assert first.answers(0) and not first.answers(1)
    buffers.done(1, first.id)
    assert fired(buffers) == [[1, 2]]  # node 1 has not asked again


def test_survivors_of_a_broken_group_meet_again_and_reports_come_once():
    buffers = GroupBuffers(range(4), first_id=100)
    buffers.add([0, 1, 2, 3])
    for w in range(4):
        buffers.request(w)
    (group,) = buffers.fire()
    buffers.done(0, group.id)
    assert buffers.lose(3) == [group]
    buffers.failed(1, group.id)
    buffers.failed(1, group.id)
    assert fired(buffers) == []
    buffers.failed(2, group.id)
    (again,) = buffers.fire()
    assert again.members == [1, 2] and again.id > group.id
    buffers.done(1, group.id)  # an old report
    assert not buffers.is_empty(1) and buffers.is_empty(0) and buffers.is_empty(3)
    buffers.done(1, again.id)
    buffers.done(2, again.id)
    assert all(buffers.is_empty(w) for w in range(4))


def test_the_last_survivor_is_a_group_of_one():
    buffers = GroupBuffers(range(2))
    buffers.add([0, 1])
    buffers.request(0)
    buffers.request(1)
    (group,) = buffers.fire()
    buffers.failed(0, group.id)
    buffers.lose(1)
    assert fired(buffers) == [[0]] and buffers.is_empty(0)


def test_a_member_that_goes_before_its_group_fires_is_left_out():
    buffers = GroupBuffers(range(3))
    buffers.add([0, 1, 2])
    buffers.request(0)
    buffers.request(2)
    assert buffers.lose(1) == [] and fired(buffers) == [[0, 2]]


@pytest.mark.parametrize(
    ("n", "size", "parts"),
    [(8, 3, [3, 3, 2]), (16, 4, [4] * 4), (2, 3, [2]), (7, 2, [2, 2, 2, 1]), (1, 3, [1])],
)
def test_divisions_cover_all_in_parts_of_nearly_one_size(n, size, parts):
    drawn = divide(range(10, 10 + n), size, np.random.default_rng(0))
    assert [len(part) for part in drawn] == parts
    assert sorted(w for part in drawn for w in part) == list(range(10, 10 + n))


def test_divisions_by_machine_make_two_groups_for_each():
    groups = divide_by_machine([[0, 1, 2, 3], [4, 6], [], [9]], np.random.default_rng(3))
    heads, *rest = groups
    assert len(heads) == 3 and groups[-3:] == [[0, 1, 2, 3], [4, 6], [9]]
    assert sorted(heads + [w for group in rest[:-3] for w in group]) == [0, 1, 2, 3, 4, 6, 9]


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_never_lock_up_nor_overlap(seed):
    """Nodes that ask, meet, fail and go at random: every request of those who stay is answered."""
    rng = np.random.default_rng(seed)
    buffers, alive = GroupBuffers(range(8)), set(range(8))
    asking: set[int] = set()
    running: dict[int, set[int]] = {}
    gone_from: dict[int, bool] = {}
    for _ in range(400):
        free = sorted(alive - asking - {w for group in running.values() for w in group})
        if free and rng.random() < 0.5:
            w = int(rng.choice(free))
            asking.add(w)
            buffers.request(w)
            if buffers.is_empty(w):
                for group in divide([v for v in sorted(alive) if buffers.is_empty(v)], 3, rng):
                    buffers.add(group)
        elif running and rng.random() < 0.9:
            group_id = int(rng.choice(sorted(running)))
            w = int(rng.choice(sorted(running[group_id])))
            running[group_id].discard(w)
            if gone_from[group_id] and rng.random() < 0.7:
                buffers.failed(w, group_id)
                asking.add(w)
            else:
                buffers.done(w, group_id)
            if not running[group_id]:
                del running[group_id]
        elif len(alive) > 3 and rng.random() < 0.1:
            w = int(rng.choice(sorted(alive)))
            alive.discard(w)
            asking.discard(w)
            for group in buffers.lose(w):
                running[group.id].discard(w)
                gone_from[group.id] = True
                if not running[group.id]:
                    del running[group.id]
        for group in buffers.fire():
            members = set(group.members)
            assert members <= asking and not any(members & other for other in running.values())
            asking -= members
            if len(members) > 1:
                running[group.id], gone_from[group.id] = members, False
        if not running and asking == alive:
            raise AssertionError("everybody asks and nobody meets")
