"""The end of one stream, whatever it is doing when it is cancelled."""

from __future__ import annotations

import asyncio

from edgefl.runtimes.grpc import frames
from edgefl.runtimes.grpc.connection import Connection
from edgefl.runtimes.grpc.frames import Goodbye
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.outbox import Outbox
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
