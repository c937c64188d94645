"""Processes of a run on loopback, in one event loop, and a wire between them that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from edgefl.messages import Codec, Message
from edgefl.parameters import Layout, Vector
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.local import free_addresses
from edgefl.runtimes.grpc.outbox import Handle
from edgefl.runtimes.grpc.transport import Transport

LAYOUT = Layout.of_shapes([("w", (500_000,))])
LIMITS = Limits(connect_timeout_s=10.0, grace_s=10.0, flush_s=5.0)


@dataclass(frozen=True)
class Model(Message):
    round: int
    parameters: Vector


@dataclass(frozen=True)
class Word(Message):
    number: int


@dataclass(frozen=True)
class Blob(Message):
    data: bytes
    max_size = {"data": 1 << 30}


@dataclass(frozen=True)
class Beacon(Message):
    number: int
    lossy = True


CODEC = Codec([Model, Word, Blob, Beacon], [LAYOUT])


def model(round: int = 0) -> Model:
    """2 MB."""
    return Model(round, Vector(LAYOUT, torch.arange(500_000, dtype=torch.float32) + round))


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Wait for a condition; asserts that it comes true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class Process:
    """A transport and all that it has said."""

    transport: Transport
    messages: list[tuple[int, Message]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    back: list[tuple[int, int]] = field(default_factory=list)
    notes: list[tuple[int, str, bytes]] = field(default_factory=list)
    left: list[Message] = field(default_factory=list)
    delivered: list[tuple[Message, Exception | None]] = field(default_factory=list)

    def send(self, sender: int, receiver: int, message: Message, **options: Any) -> Handle:
        return self.transport.send(
            sender,
            receiver,
            message,
            on_left=lambda: self.left.append(message),
            on_delivered=lambda error: self.delivered.append((message, error)),
            **options,
        )

    async def deliver(self, sender: int, receiver: int, message: Message, **options: Any) -> None:
        """Send, and wait for the receipt."""
        self.send(sender, receiver, message, **options)
        await until(lambda: any(m is message for m, _ in self.delivered))
        assert self.delivered[-1] == (message, None)


def process(index: int, addresses: Sequence[str], **options: Any) -> Process:
    """A process with the node of its own index, unless `nodes_of` says otherwise."""
    holder: list[Process] = []
    settings: dict[str, Any] = {
        "nodes_of": [[i] for i in range(len(addresses))],
        "codec": CODEC,
        "run_id": "run",
        "digest": "digest",
        "limits": LIMITS,
    }
    transport = Transport(
        index=index,
        addresses=addresses,
        on_message=lambda receiver, message: holder[0].messages.append((receiver, message)),
        on_gone=lambda node: holder[0].gone.append(node),
        on_back=lambda node, life: holder[0].back.append((node, life)),
        on_control=lambda source, kind, body: holder[0].notes.append((source, kind, body)),
        **(settings | options),
    )
    holder.append(Process(transport))
    return holder[0]


@contextlib.asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[Process, Process]]:
    """Two connected processes; `first` and `second` hold options of one alone."""
    first, second = options.pop("first", {}), options.pop("second", {})
    addresses = free_addresses(2)
    a = process(0, addresses, **(options | first))
    b = process(1, addresses, **(options | second))
    await asyncio.gather(a.transport.start(), b.transport.start())
    try:
        yield a, b
    finally:
        await asyncio.gather(a.transport.close(), b.transport.close())


class Wire:
    """Carries TCP connections from a port to another, until it is cut."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.up = True
        self.carried_bytes = 0
        self.cut_after_bytes: int | None = None
        self.rate_bytes_per_s: float | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            self.cut()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        """Break all connections; new ones too, until `up` is set again."""
        self.up = False
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.up:
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, there_writer}
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(16384):
                if self.rate_bytes_per_s is not None:
                    await asyncio.sleep(len(data) / self.rate_bytes_per_s)
                self.carried_bytes += len(data)
                if self.cut_after_bytes is not None and self.carried_bytes >= self.cut_after_bytes:
                    self.cut_after_bytes = None
                    self.cut()
                    return
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


def run(program: Callable[[], Awaitable[None]]) -> None:
    """Run an async test; an error in a callback fails it, and nothing may be left running."""

    async def wrapped() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        before = asyncio.all_tasks()
        async with asyncio.timeout(30):
            await program()
        await asyncio.sleep(0.02)
        # gRPC's one poller of a process may still hold an event for an earlier test's loop.
        own = [p for p in problems if "Event loop is closed" not in repr(p.get("exception"))]
        assert not own, own
        left = {task for task in asyncio.all_tasks() - before if "_poller" not in repr(task)}
        assert not left, left

    asyncio.run(wrapped())


def numbers(p: Process, receiver: int | None = None) -> list[int]:
    return [m.number for r, m in p.messages if isinstance(m, Word | Beacon) and receiver in (None, r)]


@contextlib.asynccontextmanager
async def wired() -> AsyncIterator[tuple[Process, Process, Wire]]:
    """Two connected processes; whoever dials the second goes over the wire."""
    first, listen = free_addresses(2)
    wire = Wire(int(listen.rpartition(":")[2]))
    async with wire.open() as port:
        addresses = [first, f"127.0.0.1:{port}"]
        a, b = process(0, addresses), process(1, addresses, listen=listen)
        await asyncio.gather(a.transport.start(), b.transport.start())
        yield a, b, wire
        await asyncio.gather(a.transport.close(), b.transport.close())
