"""Crashes, returns and partitions on the virtual clock."""

from __future__ import annotations

import pytest
import torch
from toy import access, run_toy
from virtual_programs import KINDS, Load, Note, work

from edgefl.errors import Unreachable
from edgefl.nodes import Back, Gone
from edgefl.nodes.plan import Crash, FaultPlan, Partition


def test_gone_is_level_triggered_and_back_follows():
    async def watcher(node):
        seen = []
        for _ in range(2):
            m = await node.receive(Note, Gone, sender=1)
            seen.append((type(m).__name__, node.now()))
        alive = node.fleet.alive(1)
        back = await node.receive(Back, sender=1)
        return seen, alive, back.life, node.fleet.alive(1)

    async def dies(node):
        await node.sleep(1.0) if node.life else await node.sleep(100.0)

    faults = FaultPlan(crashes=(Crash(1, at_s=2.0, down_s=5.0),), detect_s=0.5)
    outcome = run_toy([watcher, dies], KINDS, faults=faults)
    assert outcome.results[0] == ([("Gone", 2.5), ("Gone", 2.5)], False, 1, True)


def test_a_crash_runs_no_sends_and_what_was_under_way_is_lost():
    async def dies(node):
        if node.life:
            return
        try:
            node.send(0, Load(torch.zeros(250_000)))
            await node.compute(work(9.0))
        finally:
            node.send(0, Note("from the dead"))

    async def other(node):
        return await node.receive(Note, Load, timeout_s=20.0)

    faults = FaultPlan(crashes=(Crash(1, at_s=0.5, down_s=1.0),))
    outcome = run_toy([other, dies], KINDS, faults=faults, access=access(1e6))
    assert outcome.results[0] is None
    assert outcome.busy_s[1] == 0.5


def test_all_tasks_that_wait_for_a_node_hear_that_it_is_gone():
    async def watches(node):
        return type(await node.receive(Note, Gone, sender=1)).__name__, node.now()

    async def watcher(node):
        beside = node.start(watches(node))
        seen = await watches(node)
        return seen, await beside

    async def dies(node):
        await node.sleep(100.0)

    faults = FaultPlan(crashes=(Crash(1, at_s=2.0),), detect_s=0.5)
    outcome = run_toy([watcher, dies], KINDS, faults=faults)
    assert outcome.results[0] == (("Gone", 2.5), ("Gone", 2.5))


def test_sending_to_the_dead_is_unreachable():
    async def sender(node):
        await node.sleep(1.5)
        try:
            await node.send(1, Note()).delivered
        except Unreachable:
            before = node.now()
        await node.receive(Gone)
        try:
            await node.send(1, Note()).delivered
        except Unreachable as error:
            return before, str(error)

    async def sleeper(node):
        await node.sleep(1000.0)

    faults = FaultPlan(crashes=(Crash(1, at_s=1.0),), detect_s=2.0)
    outcome = run_toy([sender, sleeper], KINDS, faults=faults, ends_with=[0])
    assert outcome.results[0] == (pytest.approx(3.5), "Note to 1: gone")


def test_a_program_goes_on_from_what_it_saved():
    async def saver(node):
        start = (node.saved or {"k": 0})["k"]
        for k in range(start, 10):
            await node.sleep(1.0)
            await node.save(k=k + 1)
        return start, node.now()

    faults = FaultPlan(crashes=(Crash(0, at_s=3.5, down_s=2.0),))
    assert run_toy([saver], faults=faults).results[0] == (3, 12.5)


def test_a_partition_holds_messages_until_it_heals():
    async def sender(node):
        await node.sleep(1.0)
        node.send(1, Note("held"))

    async def receiver(node):
        await node.receive(Note)
        return node.now()

    faults = FaultPlan(partitions=(Partition(frozenset({0}), at_s=0.5, for_s=4.0),))
    assert run_toy([sender, receiver], KINDS, faults=faults).results[1] == pytest.approx(4.5, abs=1e-3)


@pytest.mark.parametrize("jitter", [0.0, 0.9])
def test_what_a_partition_held_arrives_in_the_order_in_which_it_was_sent(jitter):
    """All at the instant at which it heals: times that differ by a rounding error would turn them round."""
    count = 200

    async def sends(node):
        for i in range(count):
            node.send(1, Note(number=i))
            await node.sleep(0.1 / 7 / (1 + i % 5))

    async def receives(node):
        return [(await node.receive(Note)).number for _ in range(count)]

    faults = FaultPlan(partitions=(Partition(frozenset({0}), 0.1, 3.3),))
    links = access(1e6, latency_s=0.013, jitter=jitter)
    outcome = run_toy([sends, receives], [Note], faults=faults, access=links, link_model="fair")
    assert outcome.results[1] == list(range(count))
