"""Ending together: those who have finished go on serving, and those who return do not wait for ever."""

from __future__ import annotations

from functools import partial

from toy import access, run_toy

from edgefl.nodes import Gone
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.patterns.farewell import Finished, Leaving, until_all_finish

LINKS = access(1e6, latency_s=0.1)


async def works(seconds, n, timeout_s, node):
    await node.sleep(seconds)
    others = [j for j in range(n) if j != node.id]
    await until_all_finish(node, others, timeout_s=timeout_s)
    return node.now(), [m.sender for m in node.take(Leaving)]


def test_all_end_when_the_slowest_has_finished():
    programs = [partial(works, seconds, 3, None) for seconds in (1.0, 5.0, 2.0)]
    results = run_toy(programs, [Finished, Leaving], access=LINKS).results
    assert [round(results[i][0], 1) for i in range(3)] == [5.2, 5.0, 5.2]
    assert all(left == [] for _, left in results.values())


def test_nobody_waits_for_the_dead():
    programs = [partial(works, seconds, 3, None) for seconds in (1.0, 5.0, 2.0)]
    faults = FaultPlan(crashes=(Crash(1, 3.0),), detect_s=0.5)
    results = run_toy(programs, [Finished, Leaving], access=LINKS, faults=faults).results
    assert [round(results[i][0], 1) for i in (0, 2)] == [3.5, 3.5]


def test_who_hears_nothing_for_long_leaves_and_says_so():
    programs = [partial(works, 1.0, 2, 2.0), partial(works, 9.0, 2, None)]
    results = run_toy(programs, [Finished, Leaving], access=LINKS).results
    assert round(results[0][0], 1) == 3.0
    assert results[1][1] == [0]


async def returns(n, node):
    if node.life == 0:
        await node.receive(Gone, sender=[99])
    await until_all_finish(node, [j for j in range(n) if j != node.id], timeout_s=3.0)
    return node.now()


def test_who_returns_after_the_end_of_all_others_ends_too():
    programs = [partial(works, 1.0, 2, None), partial(returns, 2)]
    faults = FaultPlan(crashes=(Crash(1, 0.5, down_s=10.0),), detect_s=0.1)
    results = run_toy(programs, [Finished, Leaving], access=LINKS, faults=faults).results
    assert round(results[0][0], 1) == 1.0 and round(results[1], 1) == 13.5
