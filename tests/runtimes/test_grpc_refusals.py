"""Bad input from the network: each kind is refused with its status, and the others are served on."""

from __future__ import annotations

import contextlib
import logging
import resource
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_lab import CODEC, Blob, Process, Word, model, pair, run, until
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from edgefl.messages import Message
from edgefl.messages.v1 import envelope_pb2, exchange_pb2, exchange_pb2_grpc
from edgefl.messages.wire import EXCHANGE_SERVICE
from edgefl.runtimes.grpc import frames

Frame = exchange_pb2.Frame
NODES = [[0], [1], [2]]


def hello(**changes: Any) -> Any:
    """The Hello of process 0."""
    known: dict[str, Any] = {
        "protocol_version": 1,
        "run_id": "run",
        "experiment_digest": "digest",
        "process": 0,
        "nodes": [0],
        "lives": [0],
        "instance": b"stranger",
    }
    return Frame(hello=exchange_pb2.Hello(**(known | changes)))


@contextlib.asynccontextmanager
async def exchange(p: Process, *sent: bytes) -> AsyncIterator[Any]:
    """A stream of a stranger who writes raw bytes to a process."""
    async with grpc.aio.insecure_channel(p.transport._listen) as channel:
        call = channel.stream_stream(f"/{EXCHANGE_SERVICE}/Exchange")()
        for data in sent:
            await call.write(data)
        yield call
        call.cancel()


async def refusal(p: Process, *sent: bytes) -> tuple[str, str]:
    """How a process ends a stream that begins with these frames."""
    async with exchange(p, *sent) as call:
        await call.done_writing()
        return (await call.code()).name, await call.details()


@contextlib.asynccontextmanager
async def serving(life: int = 1) -> AsyncIterator[tuple[Process, Any, Process]]:
    """Process 1, a stranger who has said the Hello of process 0's next life to it, and process 0."""
    async with pair() as (a, b), exchange(b, hello(lives=[life]).SerializeToString()) as call:
        assert Frame.FromString(await call.read()).WhichOneof("body") == "hello"
        yield b, call, a


async def answer(call: Any, *sent: Any) -> Any:
    for frame in sent:
        await call.write(frame if isinstance(frame, bytes) else frame.SerializeToString())
    return Frame.FromString(await call.read()).receipt


HELLOS = [
    ({"protocol_version": 2}, "protocol version '2' there, '1' here"),
    ({"run_id": "other"}, "run 'other' there, 'run' here"),
    ({"experiment_digest": "x"}, "experiment 'x' there"),
    ({"process": 7}, "process 7 does not dial here, only [0]"),
    ({"process": 1}, "process 1 does not dial here"),
    ({"nodes": [0, 1], "lives": [0, 0]}, "with nodes [0, 1], expected process 0"),
    ({"lives": []}, "expected process 0"),
    ({}, "process 0 is here already with life 0; another needs a higher one"),
]


def test_a_stranger_is_refused_and_the_present_connection_goes_on() -> None:
    async def program() -> None:
        async with pair() as (a, b):
            for changes, text in HELLOS:
                code, details = await refusal(b, hello(**changes).SerializeToString())
                assert code == "FAILED_PRECONDITION" and text in details, details
            connection = b.transport._peers[0].connection
            await a.deliver(0, 1, model())
            assert connection is not None and b.transport._peers[0].connection is connection
            assert a.transport._peers[1].arrivals == 1

    run(program)


def test_a_stream_that_does_not_begin_with_hello_is_refused() -> None:
    async def program() -> None:
        async with pair() as (a, b):
            for sent in ([], [b""], [b"\xff\xff"], [Frame(goodbye={}).SerializeToString()]):
                assert (await refusal(b, *sent))[0] == "INVALID_ARGUMENT"
            too_large = bytes(3 << 20)
            assert (await refusal(b, too_large))[0] == "RESOURCE_EXHAUSTED"
            await a.deliver(0, 1, Word(1))

    run(program)


def test_a_thousand_random_frames_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def program() -> None:
        random = np.random.default_rng(1)
        async with pair() as (a, b), grpc.aio.insecure_channel(b.transport._listen) as channel:
            method = channel.stream_stream(f"/{EXCHANGE_SERVICE}/Exchange")
            codes = set()
            peak = 0
            for k in range(1000):
                call = method(iter([random.bytes(int(random.integers(1, 400)))]))
                codes.add((await call.code()).name)
                if k == 200:
                    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
            assert codes == {"INVALID_ARGUMENT"} and grown_kb < 20_000
            await a.deliver(0, 1, Word(1))

    with caplog.at_level(logging.WARNING, "edgefl.grpc"):
        run(program)
    assert len([r for r in caplog.records if "refused a stream" in r.getMessage()]) == 1000


def start(
    message: Message, change: Callable[[Any], object] = lambda h: None, payload: bytes | None = None
) -> Any:
    """The Start of a message as process 0 would send it, after a change to its header."""
    encoded = CODEC.encode(message.stamped(0, 1), [1], 5)
    header = envelope_pb2.Header.FromString(encoded.header)
    change(header)
    chunk = b"".join(encoded.payload) if payload is None else payload
    return Frame(start={"sequence": 5, "header": header.SerializeToString(), "chunk": chunk})


def set_receivers(header: Any) -> None:
    header.receivers[:] = [2]


BAD_STARTS: list[tuple[Any, str, str]] = [
    (start(Word(1), lambda h: setattr(h, "kind", "Wrod")), "UNIMPLEMENTED", "did you mean 'Word'"),
    (start(Word(1), lambda h: setattr(h, "protocol_version", 3)), "FAILED_PRECONDITION", "version 3"),
    (start(Word(1), lambda h: setattr(h, "sender", 1)), "PERMISSION_DENIED", "node 1 is not hosted by"),
    (start(Word(1), set_receivers), "NOT_FOUND", "receivers [2]"),
    (start(Word(1), lambda h: setattr(h, "sequence", 6)), "INVALID_ARGUMENT", "sequence 6"),
    (start(Word(1), lambda h: setattr(h, "checksum", 6)), "DATA_LOSS", "checksum"),
    (start(Word(1), payload=b"x"), "INVALID_ARGUMENT", "1 bytes come, 0 were announced"),
    (start(Blob(b"abc"), payload=b"abd"), "DATA_LOSS", "checksum"),
    (start(Blob(b"abc"), payload=b"abcd"), "INVALID_ARGUMENT", "4 bytes come, 3 were announced"),
    (start(Blob(b"abc"), lambda h: h.tensors[0].shape.append(4)), "INVALID_ARGUMENT", "flat uint8"),
    (start(Blob(b"abc"), lambda h: h.tensors.add(dtype=1, codec=1)), "INVALID_ARGUMENT", "are used"),
    (Frame(start={"sequence": 5, "header": bytes(66_000)}), "RESOURCE_EXHAUSTED", "header of 66000 bytes"),
    (Frame(start={"sequence": 5}), "FAILED_PRECONDITION", "protocol version 0"),
    (
        Frame(start={"sequence": 5, "note": {"kind": "report", "payload_bytes": 2**60}}),
        "RESOURCE_EXHAUSTED",
        "note of 1152921504606846976 bytes",
    ),
]


def test_a_bad_message_is_refused_by_a_receipt_and_the_stream_goes_on() -> None:
    async def program() -> None:
        async with serving() as (b, call, _):
            for frame, code, text in BAD_STARTS:
                receipt = await answer(call, frame)
                assert receipt.status == grpc.StatusCode[code].value[0], (code, receipt)
                assert text in receipt.reason and receipt.sequence == 5
            receipt = await answer(call, start(Word(8)))
            assert receipt.delivered and not receipt.status
            assert [m for _, m in b.messages] == [Word(8)]

    run(program)


def test_a_message_of_many_gigabytes_takes_no_memory() -> None:
    async def program() -> None:
        def huge(header: Any) -> None:
            header.tensors[0].shape[:] = [2**40]
            header.payload_bytes = 2**40

        async with serving() as (_, call, _):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(50):
                receipt = await answer(call, start(Blob(b"abc"), huge, b""))
                assert receipt.status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000

    run(program)


def test_a_truncated_stream_leaves_nothing_behind_and_the_message_goes_on_where_it_ended() -> None:
    async def program() -> None:
        body = bytes(range(250)) * 8000
        async with serving() as (b, call, _):
            begin = start(Blob(body), payload=b"")
            assert (await answer(call, begin)).received == 0
            first = Frame(data={"sequence": 5, "offset": 0, "chunk": body[:900_000]})
            assert (await answer(call, first)).received == 900_000
            call.cancel()
            await until(lambda: b.transport._peers[0].connection is None)
            again = hello(lives=[1], open=[5]).SerializeToString()
            async with exchange(b, again) as second:
                await second.read()
                begin.start.resumed = True
                receipt = await answer(second, begin)
                assert receipt.received == 900_000 and receipt.rewind
                gap = Frame(data={"sequence": 5, "offset": 950_000, "chunk": b"x"})
                assert (await answer(second, gap)).received == 900_000
                rest = [
                    Frame(data={"sequence": 5, "offset": at, "chunk": body[at : at + 550_000]})
                    for at in (900_000, 1_450_000)
                ]
                assert (await answer(second, rest[0])).received == 1_450_000
                assert (await answer(second, rest[1])).delivered
                assert [m for _, m in b.messages] == [Blob(body)]
                assert (await answer(second, begin)).delivered, "a repeat is acknowledged, and dropped"
                assert len(b.messages) == 1

    run(program)


def test_a_checksum_that_comes_last_is_held_against_the_payload() -> None:
    body = bytes(range(250)) * 8

    async def program() -> None:
        async with serving() as (b, call, _):
            for checksum, delivered in ((zlib.crc32(body) ^ 1, False), (0, False), (zlib.crc32(body), True)):
                begin = start(Blob(body), lambda h: setattr(h, "checksum", 0), body[:900])
                begin.start.checksum_last = True
                assert (await answer(call, begin)).received == 900
                rest = {"sequence": 5, "offset": 900, "chunk": body[900:], "checksum": checksum}
                receipt = await answer(call, Frame(data=rest))
                assert receipt.delivered == delivered
                assert receipt.status == (0 if delivered else grpc.StatusCode.DATA_LOSS.value[0])
            assert [m for _, m in b.messages] == [Blob(body)]

    run(program)


@pytest.mark.parametrize("revision", [0, 1])
def test_who_knows_only_the_first_form_of_the_protocol_is_spoken_to_in_it(revision: int) -> None:
    body = bytes(range(250)) * 8000

    async def program() -> None:
        async with pair() as (_, b):
            greeting = hello(lives=[1], revision=revision).SerializeToString()
            async with exchange(b, greeting) as call:
                await call.read()
                await until(lambda: b.transport._peers[0].life == 1)
                b.send(1, 0, Blob(body))
                (first,) = frames.read(await call.read())
                assert isinstance(first, frames.Start) and first.checksum_last == (revision > 0)
                header = envelope_pb2.Header.FromString(bytes(first.header))
                assert header.checksum == (0 if revision else zlib.crc32(body))
                offset = 0
                while offset < len(body):
                    await call.write(frames.write(frames.Receipt(first.sequence, offset, rewind=not offset)))
                    (data,) = frames.read(await call.read())
                    assert isinstance(data, frames.Data) and data.offset == offset
                    offset += len(data.chunk)
                assert data.checksum == (zlib.crc32(body) if revision else 0)

                def answer_at_once(*_: object) -> None:
                    b.send(1, 0, Word(2))

                b.transport._on_message = answer_at_once
                await call.write(start(Word(1)).SerializeToString())
                together = frames.read(await call.read())
                assert len(together) == (2 if revision else 1)
                assert isinstance(together[0], frames.Receipt) and together[0].delivered

    run(program)


def test_frames_that_have_no_place_end_the_stream() -> None:
    async def program() -> None:
        async with serving() as (_, call, _):
            await call.write(hello(lives=[1]).SerializeToString())
            assert (await call.code()).name == "FAILED_PRECONDITION"

    run(program)


def test_a_new_life_takes_the_place_of_the_old_connection() -> None:
    async def program() -> None:
        async with serving() as (b, call, a):
            await until(lambda: "already with life 1" in a.transport._peers[1].problem)
            assert b.back == [(0, 1)] and b.gone == []
            assert (await answer(call, start(Word(3)))).delivered

    run(program)


def test_the_service_is_ordinary_grpc_with_health_and_reflection() -> None:
    async def program() -> None:
        async with pair() as (_, b), grpc.aio.insecure_channel(b.transport._listen) as channel:
            stub = exchange_pb2_grpc.ExchangeServiceStub(channel)
            call = stub.Exchange(iter([hello(run_id="other")]))
            assert (await call.code()).name == "FAILED_PRECONDITION"
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", EXCHANGE_SERVICE):
                reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=EXCHANGE_SERVICE)
            replies = [r async for r in reflection.ServerReflectionInfo(iter([request]))]
            assert replies[0].file_descriptor_response.file_descriptor_proto

    run(program)
