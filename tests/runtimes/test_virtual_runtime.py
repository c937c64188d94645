"""What operations mean, on the virtual clock."""

from __future__ import annotations

import pytest
import torch
from toy import Watcher, access, run_toy
from virtual_programs import KINDS, Latest, Load, Note, Round, nothing, work

from edgefl.errors import EdgeflError, ProgramFailed, Stuck
from edgefl.learning.cost import Cost
from edgefl.learning.work import Call


def test_sleep_and_compute_take_their_time():
    async def program(node):
        await node.sleep(1.5)
        got = await node.compute(work(2.0, "done"))
        return node.now(), got

    assert run_toy([program]).results[0] == (3.5, "done")


def test_compute_items_queue_on_one_lane():
    async def program(node):
        tasks = [node.start(node.compute(work(1.0, k))) for k in range(3)]
        ends = []
        for task in tasks:
            ends.append((await task, node.now()))
        return ends

    outcome = run_toy([program])
    assert outcome.results[0] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert outcome.busy_s[0] == 3.0


def test_a_share_runs_beside_the_queue():
    async def program(node):
        queued = node.start(node.compute(work(1.0)))
        await node.compute(work(1.0), share=0.5)
        return node.now(), queued.done

    assert run_toy([program]).results[0] == (2.0, True)


def test_cancelled_compute_is_charged_until_then_and_never_carried_out():
    ran = []

    async def program(node):
        task = node.start(node.compute(Call(ran.append, (1,), Cost(seconds=10.0))))
        await node.sleep(4.0)
        task.cancel()
        await node.compute(work(1.0))
        return node.now()

    outcome = run_toy([program])
    assert outcome.results[0] == 5.0 and outcome.busy_s[0] == 5.0 and ran == []


def test_transfer_takes_size_over_rate_plus_latency_and_uplink_frees_first():
    async def sender(node):
        transfer = node.send(1, Load(torch.zeros(250_000)))
        await transfer
        left = node.now()
        await transfer.delivered
        return left, node.now()

    async def receiver(node):
        m = await node.receive(Load)
        return node.now(), m.sender, len(m.values)

    links = [access(1e6, latency_s=0.05), access(1e6, latency_s=0.05)]
    results = run_toy([sender, receiver], KINDS, access=links).results
    assert results[0][0] == pytest.approx(1.0, rel=1e-3)
    assert results[1][0] == pytest.approx(1.1, rel=1e-3)
    assert results[1][1:] == (0, 250_000)


def test_receive_takes_the_oldest_match_and_leaves_the_rest():
    async def sender(node):
        for k in (3, 1, 2):
            node.send(1, Note("n", k))
        node.send(1, Latest(7))

    async def receiver(node):
        await node.sleep(1.0)
        first = await node.receive(Note, Latest)
        exact = await node.receive(Note, number=2)
        rest = node.take(Note, Latest)
        none = await node.receive(Note, timeout_s=0.5)
        return first.number, exact.number, [m.number for m in rest], none, node.now()

    assert run_toy([sender, receiver], KINDS).results[1] == (3, 2, [1, 7], None, 1.5)


def test_newest_by_keeps_one_and_stale_by_drops_the_older_rounds():
    async def sender(node):
        for k in range(3):
            node.send(1, Latest(k))
            node.send(1, Round(k))

    async def receiver(node):
        await node.sleep(1.0)
        latest = node.take(Latest)
        r = await node.receive(Round, round=2)
        return [m.number for m in latest], r.round, node.take(Round)

    outcome = run_toy([sender, receiver], KINDS)
    assert outcome.results[1] == ([2], 2, [])
    assert outcome.stale == {"Round": 2}


def test_first_returns_the_message_or_the_task_and_losers_lose_nothing():
    async def sender(node):
        await node.sleep(1.0)
        node.send(1, Note("late", 1))

    async def receiver(node):
        task = node.start(node.compute(work(0.5, "computed")))
        a = await node.first(node.receive(Note), task)
        b = await node.first(node.receive(Note), timeout_s=0.1)
        c = await node.first(node.receive(Note))
        return a is task, task.value, b, c.text

    assert run_toy([sender, receiver], KINDS).results[1] == (True, "computed", None, "late")


def test_children_end_with_their_parent_and_may_still_send():
    async def child(node):
        try:
            await node.sleep(100.0)
        finally:
            node.send(1, Note("bye"))

    async def parent(node):
        node.start(child(node))
        await node.sleep(1.0)

    async def other(node):
        return (await node.receive(Note)).text, node.now()

    text, at = run_toy([parent, other], KINDS).results[1]
    assert text == "bye" and at == pytest.approx(1.0, abs=1e-3)


def test_a_childs_error_cancels_its_siblings_and_surfaces_in_the_parent():
    async def fails(node):
        await node.sleep(1.0)
        raise KeyError("broken")

    async def parent(node):
        sibling = node.start(node.compute(work(50.0)))
        node.start(fails(node))
        try:
            await node.sleep(10.0)
        except KeyError:
            return node.now(), sibling.done

    assert run_toy([parent]).results[0] == (1.0, True)


def test_failed_work_raises_at_its_await():
    def broken():
        raise ZeroDivisionError("x")

    async def program(node):
        try:
            await node.compute(Call(broken))
        except ZeroDivisionError:
            return "caught"

    assert run_toy([program]).results[0] == "caught"


def test_a_programs_error_ends_the_run_with_who_when_and_why():
    async def program(node):
        await node.sleep(2.0)
        raise RuntimeError("no more")

    with pytest.raises(
        ProgramFailed, match=r"role 0 0 \(toy\) failed at 2.000 s .*RuntimeError: no more"
    ) as caught:
        run_toy([program, nothing])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_nobody_can_move_says_who_waits_for_what():
    async def waits(node):
        await node.receive(Note, sender=1 - node.id, number=3)

    with pytest.raises(Stuck) as caught:
        run_toy([waits, waits], KINDS)
    assert len(caught.value.waits) == 2
    assert "waits for Note from 1 with number=3" in str(caught.value)


def test_cancelled_transfer_charges_what_left_and_the_receiver_sees_nothing():
    async def sender(node):
        transfer = node.send(1, Load(torch.zeros(250_000)))
        await node.sleep(0.25)
        transfer.cancel()
        await node.send(1, Note("after"))
        return node.now()

    async def receiver(node):
        m = await node.receive(Note, Load)
        return type(m).__name__, node.now()

    outcome = run_toy([sender, receiver], KINDS, access=access(1e6))
    assert outcome.results[1] == ("Note", pytest.approx(0.25, abs=1e-2))


def test_time_limit_stops_the_run_and_leaves_nothing_running():
    ended = []

    async def program(node):
        try:
            while True:
                await node.sleep(1.0)
        finally:
            ended.append(node.id)

    watcher = Watcher(every_s=2.0)
    outcome = run_toy([program, program], time_s=5.0, watcher=watcher)
    assert (outcome.status, outcome.reason, outcome.time_s) == ("stopped", "time limit", 5.0)
    assert ended == [0, 1] and watcher.ticks == [2.0, 4.0]


def test_a_task_may_not_cancel_itself():
    async def program(node):
        task = node.start(inner(node))
        return await task

    async def inner(node):
        me = node._port.current
        try:
            me.cancel()
        except RuntimeError:
            return "refused"

    assert run_toy([program]).results[0] == "refused"


def test_awaiting_a_cancelled_task_is_an_error_and_so_is_a_foreign_await():
    async def program(node):
        task = node.start(node.sleep(5.0))
        task.cancel()
        try:
            await task
        except EdgeflError as error:
            return str(error)

    assert run_toy([program]).results[0] == "this task was cancelled"

    class Foreign:
        def __await__(self):
            yield "not an operation"

    async def wrong(node):
        await Foreign()

    with pytest.raises(ProgramFailed, match="awaits operations of its node"):
        run_toy([wrong])


def test_sending_to_a_node_that_does_not_exist_is_refused():
    async def program(node):
        node.send(5, Note())

    with pytest.raises(ProgramFailed, match="the fleet has nodes 0 to 0"):
        run_toy([program], KINDS)
