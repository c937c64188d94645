"""Gather: one report from each, in order of arrival, whoever dies or is late."""

from __future__ import annotations

from dataclasses import dataclass

from toy import run_toy

from edgefl.nodes import Message
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.patterns.gather import gather
from edgefl.patterns.rounds import somebody_alive


@dataclass(frozen=True)
class Report(Message):
    round: int
    value: int


def gathering(**how):
    async def server(node):
        got = [m.value async for m in gather(node, Report, [1, 2, 3], round=1, **how)]
        return got, round(node.now(), 3)

    return server


async def reporter(node):
    await node.sleep(4.0 - node.id)
    node.send(0, Report(0, -1))
    node.send(0, Report(1, node.id))


FLEET = [reporter] * 3


def test_reports_come_in_order_of_arrival_and_of_the_round():
    assert run_toy([gathering(), *FLEET], (Report,)).results[0] == ([3, 2, 1], 3.0)


def test_what_has_not_come_in_time_is_given_up():
    assert run_toy([gathering(timeout_s=2.5), *FLEET], (Report,)).results[0] == ([3, 2], 2.5)


def test_the_dead_are_not_waited_for():
    faults = FaultPlan(crashes=(Crash(1, at_s=0.5),), detect_s=0.25)
    outcome = run_toy([gathering(), *FLEET], (Report,), faults=faults, ends_with=[0])
    assert outcome.results[0] == ([3, 2], 2.0)


def test_a_report_that_arrived_before_its_sender_died_counts():
    faults = FaultPlan(crashes=(Crash(3, at_s=1.5),), detect_s=0.25)

    async def late(node):
        await node.sleep(2.8)
        return await gathering()(node)

    outcome = run_toy([late, *FLEET], (Report,), faults=faults, ends_with=[0])
    assert outcome.results[0] == ([3, 2, 1], 3.0)


def test_somebody_alive_waits_for_the_first_return():
    async def server(node):
        await node.sleep(2.0)
        await somebody_alive(node, [1, 2])
        return node.now()

    async def sleeper(node):
        await node.sleep(100.0)

    faults = FaultPlan(crashes=(Crash(1, 0.5, down_s=6.0), Crash(2, 0.5, down_s=4.0)), detect_s=0.1)
    assert run_toy([server, sleeper, sleeper], faults=faults, ends_with=[0]).results[0] == 4.5
