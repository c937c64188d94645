"""One stream between two processes: frames out as pacing allows, frames in as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

import grpc

from edgefl.errors import ProtocolError
from edgefl.runtimes.grpc import frames
from edgefl.runtimes.grpc.frames import Frame, Goodbye
from edgefl.runtimes.grpc.outbox import Job, Outbox
from edgefl.runtimes.grpc.pacing import Uplink
from edgefl.runtimes.grpc.stats import Stats

_FAREWELL_S = 1.0
"""After Goodbye, the other side has this long to end the stream."""
_TURNS_FOR_AN_ANSWER = 2
"""Turns of the loop in which a program may answer what has come before its receipt leaves."""


class Stream(Protocol):
    """What a call (at the dialer) and a context (at the server) of grpc.aio have in common."""

    async def read(self) -> bytes: ...
    async def write(self, data: bytes, /) -> None: ...


class Connection:
    """Carries an outbox's frames and hands incoming ones to `on_frame`.

    latency_s: each frame is held back so long, as a longer link would.
    """

    def __init__(
        self,
        stream: Stream,
        outbox: Outbox,
        on_frame: Callable[[Frame], None],
        *,
        uplink: Uplink,
        latency_s: float,
        stats: Stats,
    ) -> None:
        self._stream, self._outbox, self._on_frame = stream, outbox, on_frame
        self._uplink, self._latency_s, self._stats = uplink, latency_s, stats
        self._late: deque[tuple[float, bytes]] = deque()
        self._late_came = asyncio.Event()
        self._closing, self._farewell = False, True
        self._replaced = asyncio.Event()
        self.ended = asyncio.Event()

    def close(self, *, farewell: bool = True) -> None:
        """Say Goodbye when all that is ready has left, and end; without farewell, just end."""
        self._closing, self._farewell = True, farewell
        self._outbox.wake.set()

    def replace(self) -> None:
        """End at once: another stream takes this one's place."""
        self._replaced.set()

    async def run(self) -> None:
        """Carry frames until either side says Goodbye or the stream breaks.

        Raises ProtocolError for what is no frame, and what the stream raises.
        """
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        tasks = {reader, writer, asyncio.create_task(self._wait_for_replacement())}
        if self._latency_s > 0:
            tasks.add(asyncio.create_task(self._carry_late()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if writer in done and writer.exception() is None and self._farewell:
                await asyncio.wait({reader}, timeout=_FAREWELL_S)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # gRPC cancels a handler whose caller has left, even while it waits here
                self.ended.set()

    async def _wait_for_replacement(self) -> None:
        await self._replaced.wait()
        raise ProtocolError("another stream took this one's place", "ABORTED")

    async def _read(self) -> None:
        while True:
            data = await self._stream.read()
            if data is grpc.aio.EOF:
                return
            self._stats.frame_bytes_received += len(data)
            for frame in frames.read(data):
                self._on_frame(frame)
                if isinstance(frame, Goodbye):
                    return
            await asyncio.sleep(0)  # an answer leaves before this waits for more

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._outbox.wake.clear()
            if self._outbox.only_replies:
                for _ in range(_TURNS_FOR_AN_ANSWER):
                    await asyncio.sleep(0)
            async with self._uplink.turn():
                job = self._outbox.choose(loop.time())
                if job is not None:
                    await self._transmit(job)
                    continue
            if self._closing:
                break
            await self._idle(loop.time())
        if self._farewell:
            await self._send(frames.write(Goodbye()))
        while self._late:
            await asyncio.sleep(self._latency_s / 4)

    async def _transmit(self, job: Job) -> None:
        """Let one frame leave; that of a message cancelled meanwhile is charged and not sent."""
        await self._uplink.transmit(len(job.data))
        if job.message is None or not job.message.closed:
            await self._send(job.data)
        elif job.ahead:
            await self._send(frames.write(*job.ahead))
        self._outbox.left(job, asyncio.get_running_loop().time())

    async def _send(self, data: bytes) -> None:
        self._stats.frame_bytes_sent += len(data)
        if self._latency_s > 0:
            self._late.append((asyncio.get_running_loop().time() + self._latency_s, data))
            self._late_came.set()
            return
        await self._stream.write(data)

    async def _carry_late(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._late:
                due, data = self._late[0]
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self._stream.write(data)
                self._late.popleft()
            self._late_came.clear()
            await self._late_came.wait()

    async def _idle(self, now: float) -> None:
        """Wait until there may be a frame to send."""
        due = self._outbox.next_due()
        if due is None:
            await self._outbox.wake.wait()
            return
        try:
            async with asyncio.timeout(max(0.0, due - now)):
                await self._outbox.wake.wait()
        except TimeoutError:
            return
