"""The transport when a wire is cut, or a process goes away and comes back."""

from __future__ import annotations

import asyncio

import torch
from grpc_lab import (
    Blob,
    Model,
    Wire,
    Word,
    model,
    numbers,
    process,
    run,
    until,
    wired,
)

from edgefl.errors import Unreachable
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.local import free_ports


def test_a_cut_wire_costs_time_and_no_message_and_only_the_rest_is_sent_again() -> None:
    async def program() -> None:
        async with wired() as (a, b, wire):
            big = Blob(torch.arange(3_000_000).numpy().tobytes())
            wire.cut_after_bytes = wire.carried_bytes + 12_000_000
            a.send(0, 1, big)
            for k in range(20):
                b.send(1, 0, Word(k))
            await until(lambda: not wire.up)
            a.send(0, 1, Word(1))
            a.send(0, 1, Word(2))
            wire.up = True
            await until(lambda: len(a.delivered) == 3 and len(b.delivered) == 20)
            assert sorted(m.data == big.data for _, m in b.messages if isinstance(m, Blob)) == [True]
            assert numbers(b) == [1, 2] and numbers(a) == list(range(20))
            assert a.transport.stats.frame_bytes_sent < 34_000_000, "of 24 MB, 12 had come"
            assert a.transport.stats.flows[0, 1, "Blob"].messages == 1
            assert not (a.gone or b.gone or a.back or b.back)

    run(program)


def test_many_cuts_lose_double_and_reorder_nothing() -> None:
    async def program() -> None:
        async with wired() as (a, b, wire):
            for cut in range(6):
                for k in range(40):
                    a.send(0, 1, Word(100 * cut + k))
                    b.send(1, 0, Word(100 * cut + k))
                a.send(0, 1, model(cut))
                wire.cut_after_bytes = wire.carried_bytes + 300_000 * cut + 500
                await asyncio.sleep(0.03)
                wire.cut()
                wire.cut_after_bytes, wire.up = None, True
            await until(lambda: len(a.delivered) == 6 * 41 and len(b.delivered) == 6 * 40)
            expected = [100 * cut + k for cut in range(6) for k in range(40)]
            assert numbers(a) == numbers(b) == expected
            assert [m.round for _, m in b.messages if isinstance(m, Model)] == list(range(6))

    run(program)


def test_a_process_that_stays_away_is_gone_and_comes_back_with_a_higher_life() -> None:
    async def program() -> None:
        ports = free_ports(2)
        wire = Wire(ports[1])
        limits = Limits(connect_timeout_s=10.0, grace_s=0.2, flush_s=0.2)
        async with wire.open() as port:
            addresses = [f"127.0.0.1:{ports[0]}", f"127.0.0.1:{port}"]
            listen = f"127.0.0.1:{ports[1]}"
            a = process(0, addresses, limits=limits)
            b = process(1, addresses, limits=limits, listen=listen)
            await asyncio.gather(a.transport.start(), b.transport.start())
            await a.deliver(0, 1, Word(1))
            wire.cut()
            lost = Word(2)
            a.send(0, 1, lost)
            await until(lambda: a.gone and b.gone)
            assert (a.gone, b.gone) == ([1], [0])
            assert a.delivered[-1][0] is lost and isinstance(a.delivered[-1][1], Unreachable)
            assert len(a.left) == 2
            late = Word(3)
            a.send(0, 1, late)
            await until(lambda: a.delivered[-1][0] is late)
            assert isinstance(a.delivered[-1][1], Unreachable)
            await b.transport.close()
            c = process(1, addresses, limits=limits, listen=listen, life=1)
            wire.up = True
            await c.transport.start()
            await until(lambda: a.back)
            assert a.back == [(1, 1)]
            await a.deliver(0, 1, Word(4))
            assert numbers(c) == [4]
            await c.deliver(1, 0, Word(5))
            assert numbers(a) == [5]
            await asyncio.gather(a.transport.close(), c.transport.close())

    run(program)


def test_a_process_restarted_within_the_grace_gets_what_was_not_acknowledged() -> None:
    async def program() -> None:
        ports = free_ports(2)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        wire = Wire(ports[0])
        async with wire.open() as port:
            seen_by_1 = [f"127.0.0.1:{port}", addresses[1]]
            b = process(1, seen_by_1)
            a = process(0, addresses)
            await asyncio.gather(a.transport.start(), b.transport.start())
            await b.deliver(1, 0, Word(1))
            await a.transport._endpoint.stop()
            for dialer in a.transport._dialers:
                dialer.cancel()
            await until(lambda: b.transport._peers[0].connection is None)
            b.send(1, 0, Word(2))
            again = process(0, addresses, life=1)
            await again.transport.start()
            await until(lambda: len(b.delivered) == 2)
            assert numbers(again) == [2] and b.back == [(0, 1)] and b.gone == []
            await again.deliver(0, 1, Word(7))
            assert numbers(b) == [7]
            await asyncio.gather(again.transport.close(), b.transport.close(), a.transport.close())

    run(program)
