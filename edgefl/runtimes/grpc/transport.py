"""Messages between the processes of one run, over gRPC.

Each process hosts some nodes and serves the exchange service; of two processes the one of the lower index
dials. All methods are for the one thread of the asyncio loop, and all callbacks come from it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from edgefl.allocator import keep_memory
from edgefl.errors import ConfigError, ProtocolError, Unreachable
from edgefl.messages import Codec, Message
from edgefl.messages.wire import EXCHANGE_SERVICE
from edgefl.runtimes.grpc import frames
from edgefl.runtimes.grpc.assembly import Assembly, Memory
from edgefl.runtimes.grpc.attendance import Attendance
from edgefl.runtimes.grpc.connection import Connection, Stream
from edgefl.runtimes.grpc.endpoint import FIRST_RETRY_S, LONGEST_RETRY_S, Endpoint, channel
from edgefl.runtimes.grpc.frames import Hello, Note
from edgefl.runtimes.grpc.handed import Handed, HandedOver
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.outbox import Handle, Outbox
from edgefl.runtimes.grpc.outgoing import OnDelivered, OnLeft, Outgoing
from edgefl.runtimes.grpc.pacing import Uplink
from edgefl.runtimes.grpc.peer import Identity, Peer
from edgefl.runtimes.grpc.stats import Stats

log = logging.getLogger("edgefl.grpc")


class Transport:
    """Carries messages between this process and the others.

    index: this process. addresses: "host:port" of each process, where others dial it. nodes_of: ids of the
    nodes that each process hosts. listen: where this one serves, when not at its address.
    run_id, digest: of the run and its experiment, the same at all processes. life: of this process: 0, then
    one more after each restart. keeps: whether the others keep what they have sent here until `cover`, and
    send it again to a next life of this process.
    on_message(receiver, message): a message has come; once each, in order per (sender, kind).
    on_gone(node), on_back(node, life): a process stayed away for `limits.grace_s`, or has returned.
    on_control(process, kind, body): a note has come.
    uplink_bytes_per_s: a slower uplink that this process is to keep to. latencies_s: of the way to each
    process, one way, which is to seem so long; none where not given.
    """

    def __init__(
        self,
        *,
        index: int,
        addresses: Sequence[str],
        nodes_of: Sequence[Sequence[int]],
        codec: Codec,
        run_id: str,
        digest: str,
        on_message: Callable[[int, Message], None],
        on_gone: Callable[[int], None],
        on_back: Callable[[int, int], None],
        on_control: Callable[[int, str, bytes], None],
        limits: Limits | None = None,
        uplink_bytes_per_s: float | None = None,
        latencies_s: Sequence[float] = (),
        life: int = 0,
        keeps: bool = False,
        listen: str | None = None,
    ) -> None:
        self.stats = Stats()
        self._limits = limits or Limits()
        self._codec = codec
        self._listen = listen or addresses[index]
        # Random on purpose: it tells a reconnect from another process, and no result depends on it.
        instance = os.urandom(16)
        self._me = Identity(index, tuple(nodes_of[index]), life, run_id, digest, instance)
        self._uplink, self._latencies_s = Uplink(uplink_bytes_per_s), tuple(latencies_s)
        self._memory = Memory(self._limits.memory_budget_bytes)
        self._keeps = keeps
        self._handed = HandedOver()
        self._on_message, self._on_control = on_message, on_control
        self._on_gone, self._on_back = on_gone, on_back
        self._peers = {
            i: self._peer(i, addresses[i], nodes) for i, nodes in enumerate(nodes_of) if i != index
        }
        self._peer_of = {node: peer for peer in self._peers.values() for node in peer.nodes}
        self._sequences = itertools.count()
        self._endpoint: Endpoint | None = None
        self._dialers: list[asyncio.Task[None]] = []
        self._attendance = Attendance(self._peers.values(), self._limits)
        self._closing = False

    async def start(self) -> None:
        """Serve, dial, and return when all processes are connected; in a later life, at once.

        A process that returns does not know who of the others is still there: who has not connected
        within `limits.grace_s` is gone.
        Raises ConfigError when the address cannot be served, ProtocolError when another process belongs to
        a different run, RunError with who is missing after `limits.connect_timeout_s`.
        """
        keep_memory(one_heap=True)  # before gRPC begins its threads: each would keep some frames
        try:
            await self._serve()
            self._dialers = [
                asyncio.create_task(self._dial(peer)) for i, peer in self._peers.items() if i > self._me.index
            ]
            if self._me.life == 0:
                await self._attendance.complete()
            else:
                for peer in self._peers.values():
                    peer.expect()
        except BaseException:
            await self.close()
            raise

    def send(
        self,
        sender: int,
        receiver: int,
        message: Message,
        *,
        rate_bytes_per_s: float | None = None,
        on_left: OnLeft,
        on_delivered: OnDelivered,
    ) -> Handle:
        """Send a message to a node of another process.

        on_left(): the last byte has left. on_delivered(error): None when the receiver has it (or, for a
        lossy kind, when it has left), Unreachable when it never will, ProtocolError when it was refused.
        Raises TypeError or ValueError for a message that cannot travel.
        """
        peer = self._peer_of[receiver]
        sequence = next(self._sequences)
        kind = type(message)
        # A large payload is checked as it leaves: beforehand, its first byte would wait for the last one.
        at_once = self._limits.frame_bytes if peer.revision >= 1 else None
        encoded = self._codec.encode(
            message.stamped(sender, message.life), (receiver,), sequence, checked_bytes=at_once
        )
        outgoing = Outgoing(
            sequence,
            (sender, receiver, kind.__name__),
            encoded.header,
            None,
            encoded.payload,
            kind.lossy,
            rate_bytes_per_s,
            on_left,
            on_delivered,
            checksum_last=not encoded.checked,
        )
        self._post(peer, outgoing)
        return Handle(peer.outbox, outgoing)

    def control(self, process: int, kind: str, body: bytes) -> None:
        """Send a note to another process; one that has ended or is gone does not get it.

        Raises ValueError for a body over `limits.max_note_bytes`.
        """
        if len(body) > self._limits.max_note_bytes:
            raise ValueError(f"a note of {len(body)} bytes, at most {self._limits.max_note_bytes} travel")
        note = Note(kind, len(body), zlib.crc32(body))
        payload = [memoryview(body)] if body else []
        outgoing = Outgoing(next(self._sequences), "note", b"", note, payload, False, None, _ignore, _ignore)
        self._post(self._peers[process], outgoing)

    def handed_over(self, waiting: Iterable[Message]) -> list[Handed]:
        """What nodes here have had since the last call and is not among those still `waiting` for them."""
        return self._handed.take(waiting)

    def cover(self, handed: Iterable[Handed]) -> None:
        """Let their senders forget messages: this process will not come back to before them."""
        for one in handed:
            peer = self._peers[one.process]
            if peer.instance == one.instance:
                peer.assembly.cover(one.sequence)

    @property
    def kept_bytes(self) -> int:
        """Payload that the other processes keep for this one."""
        return sum(peer.assembly.kept_bytes for peer in self._peers.values())

    def lost_at(self, node: int) -> float | None:
        """When the process of a node was lost, on the loop's clock; None while it is here."""
        return self._peer_of[node].lost_at

    async def close(self, *, farewell: bool = True) -> None:
        """Let what is under way arrive, say Goodbye, and stop; what cannot arrive fails as Unreachable.

        farewell: False when this process is to come back: to the others it is lost, as after a crash.
        """
        if self._closing:
            return
        self._closing = True
        if self._endpoint is not None:
            await self._endpoint.retire()
        peers = list(self._peers.values())
        await asyncio.gather(*map(self._flush, peers))
        for peer in peers:
            peer.left = True
        connections = [peer.connection for peer in peers if peer.connection is not None]
        for connection in connections:
            connection.close(farewell=farewell)
        await asyncio.gather(*(connection.ended.wait() for connection in connections))
        for dialer in self._dialers:
            dialer.cancel()
        await asyncio.gather(*self._dialers, return_exceptions=True)
        if self._endpoint is not None:
            await self._endpoint.stop()
        for peer in peers:
            peer.stop(Unreachable("this process has closed its connections"))
        await asyncio.sleep(0)

    def _peer(self, index: int, address: str, nodes: Sequence[int]) -> Peer:
        outbox = Outbox(self._limits, self._uplink.rate_bytes_per_s, self._count)
        assembly = Assembly(
            codec=self._codec,
            limits=self._limits,
            memory=self._memory,
            peer=f"process {index}",
            here=self._me.nodes,
            there=nodes,
            keeps=self._keeps,
            reply=outbox.reply,
            on_message=lambda receiver, message, sequence: _now(
                self._hand_over, index, receiver, message, sequence
            ),
            on_note=lambda kind, body: _now(self._on_control, index, kind, body),
        )
        return Peer(
            index,
            address,
            nodes,
            outbox=outbox,
            assembly=assembly,
            limits=self._limits,
            on_gone=self._on_gone,
            on_back=self._on_back,
        )

    def _hand_over(self, process: int, receiver: int, message: Message, sequence: int) -> None:
        if self._keeps:
            self._handed.add(Handed(process, sequence, self._peers[process].instance), message)
        self._on_message(receiver, message)

    def _post(self, peer: Peer, outgoing: Outgoing) -> None:
        loop = asyncio.get_running_loop()
        lost = peer.gone or peer.ended or self._closing
        if lost or (outgoing.lossy and peer.connection is None):
            why = "has ended" if peer.ended else "is gone"
            error = None if outgoing.lossy else Unreachable(f"{peer.title} {why}")
            loop.call_soon(outgoing.on_left)
            loop.call_soon(outgoing.on_delivered, error)
            outgoing.left = outgoing.closed = True
            return
        peer.outbox.add(outgoing, loop.time())

    def _count(self, message: Outgoing) -> None:
        """Account for a message that has left, or for the part of one that had when it was given up."""
        if message.note is None:
            assert isinstance(message.stream, tuple)
            encoded = len(message.header) + message.sent
            self.stats.count(message.stream, message.sent, encoded, messages=int(message.left))

    async def _flush(self, peer: Peer) -> None:
        if peer.connection is None:
            return
        waits = [asyncio.ensure_future(e.wait()) for e in (peer.outbox.quiet, peer.connection.ended)]
        await asyncio.wait(waits, timeout=self._limits.flush_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _serve(self) -> None:
        self._endpoint = Endpoint(self._exchange, self._limits)
        try:
            await self._endpoint.start(self._listen)
        except RuntimeError as error:
            key = f"addresses[{self._me.index}]"
            raise ConfigError(key, self._listen, "a free port at an address of this machine") from error

    async def _exchange(self, _: object, context: Any) -> None:
        """Serve one stream of a process of lower index."""
        try:
            if self._closing:
                raise ProtocolError("this process is closing", "UNAVAILABLE")
            hello = await self._hello_of(context)
            peer = self._peers.get(hello.process)
            if peer is None or peer.index > self._me.index:
                dialers = sorted(i for i in self._peers if i < self._me.index)
                raise ProtocolError(
                    f"process {hello.process} does not dial here, only {dialers}", "FAILED_PRECONDITION"
                )
            async with peer.arriving:
                peer.check(hello)
                await peer.make_way()
                await context.write(frames.write(self._me.hello(peer.outbox.begun())))
                connection = self._arrive(peer, hello, context)
            await self._run(peer, connection)
        except ProtocolError as error:
            log.warning("refused a stream from %s: %s: %s", context.peer(), error.code, error)
            await context.abort(grpc.StatusCode[error.code], str(error))

    async def _dial(self, peer: Peer) -> None:
        """Keep a connection to a process of higher index, for as long as it has not ended."""
        async with channel(peer.address, self._limits) as calls:
            method = calls.stream_stream(f"/{EXCHANGE_SERVICE}/Exchange")
            pause_s = FIRST_RETRY_S
            while not peer.ended:
                arrivals = peer.arrivals
                known = peer.problem
                peer.problem = await self._dial_once(peer, method)
                level = logging.DEBUG if peer.problem == known else logging.INFO
                log.log(level, "%s: %s", peer.title, peer.problem or "the stream has ended")
                if peer.arrivals > arrivals:
                    pause_s = FIRST_RETRY_S
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    async def _dial_once(self, peer: Peer, method: Any) -> str:
        """One stream from its beginning to its end. Returns why it ended, or "" after a Goodbye."""
        call = method()
        try:
            await call.write(frames.write(self._me.hello(peer.outbox.begun())))
            hello = await self._hello_of(call)
            peer.check(hello)
            connection = self._arrive(peer, hello, call)
            await self._run(peer, connection)
        except grpc.aio.AioRpcError as error:
            self._attendance.refused(
                peer, ProtocolError(f"{peer.title}: {error.details()}", error.code().name)
            )
            return f"{error.code().name}: {_brief(error)}"
        except ProtocolError as error:
            self._attendance.refused(peer, ProtocolError(f"{peer.title}: {error}", error.code))
            return f"{error.code}: {error}"
        except asyncio.InvalidStateError:
            return "the stream has ended"
        finally:
            call.cancel()
        return ""

    async def _hello_of(self, stream: Stream) -> Hello:
        try:
            async with asyncio.timeout(self._limits.hello_timeout_s):
                data = await stream.read()
        except TimeoutError as error:
            raise ProtocolError("no Hello in time", "DEADLINE_EXCEEDED") from error
        first = frames.read(data) if data is not grpc.aio.EOF else []
        match first:
            case [Hello() as hello]:
                self._me.check(hello)
                return hello
        raise ProtocolError("a stream begins with Hello")

    def _arrive(self, peer: Peer, hello: Hello, stream: Stream) -> Connection:
        connection = Connection(
            stream,
            peer.outbox,
            peer.take,
            uplink=self._uplink,
            latency_s=self._latencies_s[peer.index] if self._latencies_s else 0.0,
            stats=self.stats,
        )
        peer.arrive(hello, connection)
        self._attendance.arrived()
        return connection

    async def _run(self, peer: Peer, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            peer.depart(connection)


def _now(callback: Callable[..., None], *arguments: object) -> None:
    """Call; an error in it is the loop's to report and breaks no connection."""
    try:
        callback(*arguments)
    except Exception as error:
        message = f"error in {callback.__qualname__}"
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


def _brief(error: grpc.aio.AioRpcError) -> str:
    """What went wrong; of a connection that fails, without gRPC's list of the addresses it tried."""
    details = error.details() or ""
    unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
    return details.rsplit(": ", 1)[-1] if unavailable else details


def _ignore(*_: object) -> None:
    """Nobody waits for a note."""
