"""The transport between real sockets: delivery, order, pacing, refusals, departures."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from grpc_lab import (
    CODEC,
    LIMITS,
    Beacon,
    Blob,
    Model,
    Process,
    Word,
    model,
    numbers,
    pair,
    process,
    run,
    until,
    wired,
)

from edgefl.errors import ConfigError, ProtocolError, RunError, Unreachable
from edgefl.messages import payload_bytes
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.local import free_addresses


def test_messages_arrive_once_and_in_order_both_ways() -> None:
    async def program() -> None:
        async with pair() as (a, b):
            for k in range(200):
                a.send(0, 1, Word(k))
                b.send(1, 0, Word(-k))
            await until(lambda: len(a.delivered) == len(b.delivered) == 200)
            assert numbers(b) == list(range(200)) and numbers(a) == [-k for k in range(200)]
            assert {error for _, error in a.delivered} == {None} and len(a.left) == 200
            assert {(m.sender, m.life) for _, m in b.messages} == {(0, 0)}

    run(program)


def test_models_arrive_bit_for_bit_and_are_counted_exactly() -> None:
    async def program() -> None:
        async with pair() as (a, b):
            sent = [model(k) for k in range(3)]
            for message in sent:
                await a.deliver(0, 1, message)
            received = [m for _, m in b.messages]
            assert [m.round for m in received if isinstance(m, Model)] == [0, 1, 2]
            for here, there in zip(sent, received, strict=True):
                assert isinstance(there, Model) and here.parameters.equal(there.parameters)
            traffic = a.transport.stats.flows[0, 1, "Model"]
            assert traffic.messages == 3
            assert traffic.payload_bytes == sum(map(payload_bytes, sent))
            assert traffic.encoded_bytes == sum(CODEC.sizes(message)[1] for message in sent)
            frame_bytes = a.transport.stats.frame_bytes_sent
            assert traffic.encoded_bytes < frame_bytes < 1.01 * traffic.encoded_bytes
            assert b.transport.stats.frame_bytes_received <= frame_bytes

    run(program)


def test_one_hundred_megabytes_arrive() -> None:
    async def program() -> None:
        codec = type(CODEC)([Blob])
        async with pair(codec=codec) as (a, b):
            data = torch.arange(25_000_000, dtype=torch.int32).numpy().tobytes()
            await a.deliver(0, 1, Blob(data))
            ((_, message),) = b.messages
            assert isinstance(message, Blob) and message.data == data

    run(program)


def test_the_memory_of_a_model_is_used_again_when_nobody_holds_it_and_not_before() -> None:
    async def program() -> None:
        async with pair() as (a, b):
            await a.deliver(0, 1, model(0))
            (_, first) = b.messages.pop()
            assert isinstance(first, Model)
            part, place = first.parameters.values[5:9], first.parameters.values.data_ptr()
            del first
            await a.deliver(0, 1, model(1))
            (_, second) = b.messages.pop()
            assert isinstance(second, Model) and second.parameters.values.data_ptr() != place
            assert part.tolist() == [5, 6, 7, 8] and torch.equal(
                second.parameters.values, model(1).parameters.values
            )
            del part
            await a.deliver(0, 1, model(2))
            (_, third) = b.messages.pop()
            assert isinstance(third, Model) and third.parameters.values.data_ptr() == place
            assert torch.equal(third.parameters.values, model(2).parameters.values)
            assert torch.equal(second.parameters.values, model(1).parameters.values)

    run(program)


def test_a_process_with_many_nodes_keeps_their_messages_apart() -> None:
    async def program() -> None:
        async with pair(nodes_of=[[0, 1], [2, 3, 4]]) as (a, b):
            for sender, receiver in [(0, 2), (1, 2), (0, 4), (1, 3)]:
                a.send(sender, receiver, Word(10 * sender + receiver))
            await until(lambda: len(a.delivered) == 4)
            assert sorted((r, m.sender) for r, m in b.messages) == [(2, 0), (2, 1), (3, 1), (4, 0)]

    run(program)


def test_a_small_message_does_not_wait_behind_a_model() -> None:
    async def program() -> None:
        async with pair(first={"uplink_bytes_per_s": 8e6}) as (a, b):
            a.send(0, 1, model())
            await asyncio.sleep(0.05)
            began = time.monotonic()
            await a.deliver(0, 1, Word(1))
            assert time.monotonic() - began < 0.1
            assert [type(m) for _, m in b.messages] == [Word]
            await until(lambda: len(b.messages) == 2)

    run(program)


def test_the_rate_of_an_unknown_link_is_found_and_frames_are_cut_to_it() -> None:
    async def program() -> None:
        async with wired() as (a, b, wire):
            wire.rate_bytes_per_s = 4e6
            a.send(0, 1, model())
            waits = []
            for k in range(4):
                await asyncio.sleep(0.03)
                began = time.monotonic()
                await a.deliver(0, 1, Word(k))
                waits.append(time.monotonic() - began)
            assert max(waits) < 0.25, "the model takes 0.5 s"
            assert not any(isinstance(m, Model) for _, m in b.messages)
            await until(lambda: len(a.delivered) == 5)

    run(program)


def test_models_to_two_nodes_share_the_uplink_frame_by_frame() -> None:
    async def program() -> None:
        async with pair(nodes_of=[[0], [1, 2]], first={"uplink_bytes_per_s": 20e6}) as (a, _):
            first, second = model(1), model(2)
            a.send(0, 1, first)
            a.send(0, 2, second)
            began = time.monotonic()
            await until(lambda: len(a.delivered) == 1)
            assert time.monotonic() - began > 0.16, "the first took the whole uplink"
            await until(lambda: len(a.delivered) == 2)

    run(program)


def test_rate_uplink_and_latency_set_the_time_of_a_transfer() -> None:
    async def program() -> None:
        async with pair(second={"latencies_s": (0.05, 0.0)}) as (a, b):
            began = time.monotonic()
            await a.deliver(0, 1, Blob(bytes(300_000)), rate_bytes_per_s=1e6)
            assert 0.34 < time.monotonic() - began < 0.5, "0.3 s at the rate, and the receipt's 0.05 s"
            began = time.monotonic()
            await b.deliver(1, 0, Word(1))
            assert 0.05 < time.monotonic() - began < 0.1
        async with pair(first={"uplink_bytes_per_s": 1e6}) as (a, b):
            began = time.monotonic()
            await a.deliver(0, 1, Blob(bytes(200_000)))
            assert 0.19 < time.monotonic() - began < 0.3

    run(program)


def test_a_cancelled_message_is_charged_for_what_left_and_never_seen() -> None:
    async def program() -> None:
        async with pair(first={"uplink_bytes_per_s": 8e6}) as (a, b):
            handle = a.send(0, 1, model())
            waiting = a.send(0, 1, model(1))
            await asyncio.sleep(0.1)
            assert waiting.cancel() and handle.cancel() and not handle.cancel()
            await a.deliver(0, 1, model(2))
            assert [m.round for _, m in b.messages if isinstance(m, Model)] == [2]
            traffic = a.transport.stats.flows[0, 1, "Model"]
            assert traffic.messages == 1 and 2_200_000 < traffic.payload_bytes < 3_600_000
            assert len(a.left) == len(a.delivered) == 1
            done = a.send(0, 1, Word(1))
            await until(lambda: len(a.left) == 2)
            assert not done.cancel()

    run(program)


def test_lossy_messages_leave_without_a_receipt_and_vanish_with_the_connection() -> None:
    async def program() -> None:
        async with wired() as (a, b, wire):
            await a.deliver(0, 1, Beacon(1))
            await until(lambda: numbers(b) == [1])
            wire.cut()
            await until(lambda: a.transport._peers[1].connection is None)
            await a.deliver(0, 1, Beacon(2))
            wire.up = True
            await a.deliver(0, 1, Word(3))
            assert numbers(b) == [1, 3]

    run(program)


def test_notes_of_any_allowed_size_pass_beside_messages() -> None:
    async def program() -> None:
        async with pair() as (a, b):
            body = torch.arange(2_000_000, dtype=torch.int16).numpy().tobytes()
            a.transport.control(1, "report", body)
            a.transport.control(1, "ended", b"")
            b.transport.control(0, "ended", b"{}")
            await until(lambda: len(b.notes) == 2 and len(a.notes) == 1)
            assert b.notes == [(0, "report", body), (0, "ended", b"")] and a.notes == [(1, "ended", b"{}")]
            assert not a.transport.stats.flows
            with pytest.raises(ValueError, match="at most 16777216"):
                a.transport.control(1, "report", bytes(16 * 2**20 + 1))

    run(program)


def test_messages_over_the_budget_wait_and_those_that_never_fit_are_refused() -> None:
    async def program() -> None:
        limits = Limits(memory_budget_bytes=5_000_000, max_message_bytes=8_000_000)
        async with pair(nodes_of=[[0, 2, 3, 4], [1]], second={"limits": limits}) as (a, b):
            for sender in (0, 2, 3, 4):
                a.send(sender, 1, model(sender))
                a.send(sender, 1, Blob(bytes(700_000)))
            await until(lambda: len(a.delivered) == 8)
            assert {error for _, error in a.delivered} == {None}
            assert sorted(m.round for _, m in b.messages if isinstance(m, Model)) == [0, 2, 3, 4]
            a.send(0, 1, Blob(bytes(6_000_000)))
            await until(lambda: len(a.delivered) == 9)
            error = a.delivered[-1][1]
            assert isinstance(error, ProtocolError) and error.code == "RESOURCE_EXHAUSTED"
            await a.deliver(0, 1, Word(1))

    run(program)


def test_after_goodbye_nothing_is_expected_and_nobody_is_gone() -> None:
    async def program() -> None:
        limits = Limits(grace_s=0.05)
        async with pair(limits=limits) as (a, b):
            b.send(1, 0, model())
            await b.transport.close()
            assert [type(m) for _, m in a.messages] == [Model]
            await until(lambda: a.transport._peers[1].ended)
            a.send(0, 1, Word(1))
            await until(lambda: len(a.delivered) == 1)
            assert isinstance(a.delivered[0][1], Unreachable) and "has ended" in str(a.delivered[0][1])
            await asyncio.sleep(0.1)
            assert a.gone == []

    run(program)


def test_who_is_missing_is_named() -> None:
    async def program() -> None:
        addresses = free_addresses(2)
        a = process(0, addresses, limits=Limits(connect_timeout_s=0.3))
        with pytest.raises(
            RunError, match=r"no connection within 0.3 s to process 1 \(127.0.0.1:\d+, nodes 1\)"
        ):
            await a.transport.start()

    run(program)


def test_who_is_waited_for_is_named_briefly(caplog: pytest.LogCaptureFixture) -> None:
    """A fleet that starts is mostly missing for the same reason: said once, of the first three."""

    async def program() -> None:
        addresses = free_addresses(6)
        a = process(0, addresses, limits=Limits(connect_timeout_s=1.5, waiting_log_s=0.7))
        with pytest.raises(
            RunError, match=r"process 1 .*process 4 .*process 5 \(\S+, nodes 5\): UNAVAILABLE"
        ) as e:
            await a.transport.start()
        assert str(e.value).count("UNAVAILABLE") == 1

    run(program)
    said = next(m for m in caplog.messages if m.startswith("waiting for process 1 "))
    assert (
        said.count("process ") == 3 and said.count("UNAVAILABLE") == 1 and "; and 2 more; for another" in said
    )


def test_a_taken_port_is_refused_in_one_line() -> None:
    async def program() -> None:
        addresses = free_addresses(2)
        async with pair() as (a, _):
            taken = a.transport._listen
            c = process(0, [taken, addresses[1]])
            with pytest.raises(ConfigError, match=r"addresses\[0\] = '127.0.0.1:\d+': a free port"):
                await c.transport.start()

    run(program)


@pytest.mark.parametrize(("option", "what"), [("run_id", "run"), ("digest", "experiment")])
def test_processes_of_different_runs_say_so_and_do_not_start(option: str, what: str) -> None:
    async def program() -> None:
        addresses = free_addresses(2)
        a = process(0, addresses, **{option: "other"})
        b = process(1, addresses, limits=Limits(connect_timeout_s=1.0))
        waiting = asyncio.ensure_future(b.transport.start())
        with pytest.raises(ProtocolError, match=f"process 1 .*: {what} 'other' there") as caught:
            await a.transport.start()
        assert caught.value.code == "FAILED_PRECONDITION"
        with pytest.raises(RunError, match="process 0"):
            await waiting

    run(program)


def test_three_processes_that_start_at_different_times_find_each_other() -> None:
    async def program() -> None:
        addresses = free_addresses(3)
        everyone = [process(i, addresses, limits=LIMITS) for i in range(3)]

        async def begin(p: Process, after_s: float) -> None:
            await asyncio.sleep(after_s)
            await p.transport.start()

        await asyncio.gather(*(begin(p, 0.15 * i) for i, p in enumerate(everyone)))
        await asyncio.gather(*(p.deliver(i, (i + 1) % 3, Word(i)) for i, p in enumerate(everyone)))
        assert [numbers(p) for p in everyone] == [[2], [0], [1]]
        await asyncio.gather(*(p.transport.close() for p in everyone))

    run(program)
