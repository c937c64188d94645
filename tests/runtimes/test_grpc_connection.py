"""The end of one stream, whatever it is doing when it is cancelled."""

from __future__ import annotations

import asyncio

from edgefl.runtimes.grpc import frames
from edgefl.runtimes.grpc.connection import Connection
from edgefl.runtimes.grpc.frames import Cancel, Frame, Goodbye, Receipt
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.outbox import Outbox
from edgefl.runtimes.grpc.outgoing import Outgoing
from edgefl.runtimes.grpc.pacing import Uplink
from edgefl.runtimes.grpc.stats import Stats


class SlowToLeave:
    """A stream whose other side says Goodbye at once, and whose write takes its time to be cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def read(self) -> bytes:
        return frames.write(Goodbye())

    async def write(self, data: bytes) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            self.cancelled.set()
            await asyncio.sleep(0.05)


class Recorded:
    """A stream that takes all and says nothing."""

    def __init__(self) -> None:
        self.sent: list[list[Frame]] = []

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def write(self, data: bytes) -> None:
        self.sent.append(frames.read(data))


def test_a_receipt_leaves_though_the_message_that_it_was_to_leave_with_is_withdrawn() -> None:
    async def scenario() -> None:
        stream, loop = Recorded(), asyncio.get_running_loop()
        outbox = Outbox(Limits(), None, lambda message: None)
        outbox.begin(loop.time(), together=True)
        header = bytes(1000)
        word = Outgoing(1, "words", header, None, [], False, None, lambda: None, lambda error: None)
        outbox.add(word, loop.time())
        outbox.reply(Receipt(7, 0, delivered=True))
        connection = Connection(
            stream, outbox, lambda frame: None, uplink=Uplink(10_000.0), latency_s=0.0, stats=Stats()
        )
        running = asyncio.create_task(connection.run())
        await asyncio.sleep(0.02)  # its 1000 bytes take the uplink for 0.1 s
        assert not stream.sent
        outbox.cancel(word, loop.time())
        async with asyncio.timeout(5):
            while len(stream.sent) < 2:
                await asyncio.sleep(0.01)
        assert stream.sent == [[Receipt(7, 0, delivered=True)], [Cancel(1)]]
        running.cancel()
        await asyncio.wait({running}, timeout=5)

    asyncio.run(scenario())


def test_receipts_of_deliveries_go_with_a_small_message_and_before_a_large_one() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        outbox = Outbox(Limits(), None, lambda message: None)
        outbox.begin(loop.time(), together=True)
        for sequence, size in ((1, 1000), (2, 500_000)):
            payload = [memoryview(bytes(size))]
            outbox.add(
                Outgoing(sequence, sequence, b"h", None, payload, False, None, lambda: None, lambda e: None),
                loop.time(),
            )
        left = []
        for sequence in (7, 8):
            outbox.reply(Receipt(sequence, 0, delivered=True))
            job = outbox.choose(loop.time())
            assert job is not None
            left.append([type(frame).__name__ for frame in frames.read(job.data)])
        assert left == [["Receipt", "Start"], ["Receipt"]]

    asyncio.run(scenario())


def test_a_connection_that_is_cancelled_while_it_ends_has_ended() -> None:
    async def scenario() -> None:
        stream = SlowToLeave()
        outbox = Outbox(Limits(), None, lambda message: None)
        connection = Connection(
            stream, outbox, lambda frame: None, uplink=Uplink(None), latency_s=0.0, stats=Stats()
        )
        connection.close()  # its own Goodbye is being written when the other one comes
        running = asyncio.create_task(connection.run())
        await stream.cancelled.wait()
        running.cancel()
        await asyncio.wait({running}, timeout=5)
        async with asyncio.timeout(5):
            await connection.ended.wait()

    asyncio.run(scenario())
