"""All that comes from one process: payloads put together in one buffer each, checked, in order, once."""

from __future__ import annotations

import asyncio
import logging
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

import grpc
import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ProtocolError
from edgefl.messages import Codec, Message, Plan
from edgefl.runtimes.grpc.frames import Data, Note, Receipt, Start
from edgefl.runtimes.grpc.limits import SMALL_BYTES, Limits
from edgefl.runtimes.grpc.pacing import clock_us

log = logging.getLogger("edgefl.grpc")
_LEAST_KEPT_BYTES, _MOST_KEPT_BYTES = 1 << 20, 256 << 20


class Memory:
    """The budget for payloads that are being received, shared by all connections of a process.

    The memory of the last large payload that nobody holds any more is kept for the next of its size: a model
    of 100 MB would be faulted in anew, page by page, in each round.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._free = budget_bytes
        self._idle: deque[NDArray[np.uint8]] = deque(maxlen=1)
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def request(self, num_bytes: int, granted: Callable[[], None]) -> None:
        """Call `granted` when so many bytes are free: at once, or later in the order of the requests.

        Small messages do not wait behind large ones.
        """
        if num_bytes <= SMALL_BYTES and num_bytes <= self._free:
            self._free -= num_bytes
            granted()
            return
        self._waiting.append((num_bytes, granted))
        self._grant()

    def buffer(self, num_bytes: int) -> memoryview:
        """Memory for a payload; it may be used again when the last tensor in it is gone."""
        if not _LEAST_KEPT_BYTES <= num_bytes <= _MOST_KEPT_BYTES:
            return np.empty(num_bytes, np.uint8).data
        try:
            block = self._idle.pop()
        except IndexError:
            block = np.empty(num_bytes, np.uint8)
        if block.nbytes != num_bytes:
            block = np.empty(num_bytes, np.uint8)
        lent = block[:]  # all views of a payload hold this array, and none of them the block
        weakref.finalize(lent, self._idle.append, block).atexit = False
        return lent.data

    def give_back(self, num_bytes: int) -> None:
        self._free += num_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            num_bytes, granted = self._waiting.popleft()
            self._free -= num_bytes
            granted()


@dataclass(eq=False, slots=True)
class Incoming:
    """A message or note that is being received. buffer: None until there is memory for it."""

    sequence: int
    stream: Hashable
    plan: Plan | Note
    size: int
    checksum: int
    checksum_last: bool = False
    """It comes with the last bytes."""
    receivers: Sequence[int] = ()
    buffer: memoryview | None = None
    received: int = 0
    running_checksum: int = 0
    rewound_at: int = -1
    message: Message | None = None
    complete: bool = False
    closed: bool = False


class Assembly:
    """Receives from one process.

    here, there: ids of the nodes that this process and the other one host. keeps: whether the other one
    is to keep its messages until `cover` frees them.
    reply: sends a receipt. on_message(receiver, message, sequence), on_note(kind, body): called once per
    complete message or note, in order per (sender, receivers, kind).
    """

    def __init__(
        self,
        *,
        codec: Codec,
        limits: Limits,
        memory: Memory,
        peer: str,
        here: Collection[int],
        there: Collection[int],
        keeps: bool,
        reply: Callable[[Receipt], None],
        on_message: Callable[[int, Message, int], None],
        on_note: Callable[[str, bytes], None],
    ) -> None:
        self._codec, self._limits, self._memory, self._peer = codec, limits, memory, peer
        self._here, self._there = frozenset(here), frozenset(there)
        self._reply, self._on_message, self._on_note = reply, on_message, on_note
        self.keeps = keeps
        self._kept: dict[int, int] = {}
        """Payload bytes of what has been handed over and is not covered, by sequence."""
        self._open: dict[int, Incoming] = {}
        self._order: dict[Hashable, deque[Incoming]] = {}
        self._delivered: dict[Hashable, int] = {}

    def forget(self) -> None:
        """The other process started anew: nothing that it sent before counts."""
        self.keep_only(())
        self._delivered.clear()
        self._kept.clear()

    @property
    def kept_bytes(self) -> int:
        """Payload that the other process keeps for this one."""
        return sum(self._kept.values())

    def cover(self, sequence: int) -> None:
        """The other process need not keep a message any longer."""
        size = self._kept.pop(sequence, None)
        if size is not None:
            self._reply(Receipt(sequence, size, delivered=True))

    def keep_only(self, sequences: Collection[int]) -> None:
        """Drop all that the other process does not go on with."""
        kept = set(sequences)
        dropped = [incoming for s, incoming in self._open.items() if s not in kept]
        for incoming in dropped:
            self._close(incoming)
        for stream in {incoming.stream for incoming in dropped}:
            self._deliver(stream)

    def cancel(self, sequence: int) -> None:
        """Forget a message that has been withdrawn."""
        incoming = self._open.get(sequence)
        if incoming is not None:
            self._close(incoming)
            self._deliver(incoming.stream)

    def start(self, frame: Start) -> None:
        """A message begins, or goes on. One that must not come is refused by a receipt."""
        known = self._open.get(frame.sequence)
        if known is not None:
            if known.buffer is not None:
                self._reply(Receipt(known.sequence, known.received, rewind=True))
            return
        try:
            incoming = self._announced(frame)
        except ProtocolError as error:
            self._refuse(frame.sequence, error)
            return
        if frame.sequence <= self._delivered.get(incoming.stream, -1):
            self._reply(self._done(incoming))
            return
        self._open[frame.sequence] = incoming
        self._order.setdefault(incoming.stream, deque()).append(incoming)
        self._memory.request(incoming.size, lambda: self._make_room(incoming))
        if incoming.buffer is None:
            incoming.rewound_at = 0
        elif frame.resumed and incoming.size:
            self._reply(Receipt(frame.sequence, 0, rewind=True))
        else:
            self._take(incoming, frame.chunk)

    def data(self, frame: Data) -> None:
        """Bytes of a message. Of one that is withdrawn, refused or waits for memory, they are dropped."""
        incoming = self._open.get(frame.sequence)
        if incoming is None or incoming.buffer is None or frame.offset < incoming.received:
            return
        if frame.offset > incoming.received:
            if incoming.rewound_at != incoming.received:
                incoming.rewound_at = incoming.received
                self._reply(Receipt(frame.sequence, incoming.received, rewind=True))
            return
        if incoming.checksum_last:
            incoming.checksum = frame.checksum
        self._take(incoming, frame.chunk)

    def _announced(self, frame: Start) -> Incoming:
        """What a Start announces, held against all bounds before memory is taken."""
        if len(self._open) >= self._limits.max_open_messages:
            raise ProtocolError(f"{len(self._open)} messages are under way at once", "RESOURCE_EXHAUSTED")
        if frame.note is not None:
            return self._announced_note(frame.sequence, frame.note)
        most = min(self._limits.max_message_bytes, self._limits.memory_budget_bytes)
        plan = self._codec.check_header(frame.header, memory_bytes=most)
        header = plan.header
        if header.sequence != frame.sequence:
            raise ProtocolError(f"sequence {header.sequence} in the header, {frame.sequence} in its frame")
        if header.sender not in self._there:
            raise ProtocolError(f"node {header.sender} is not hosted by {self._peer}", "PERMISSION_DENIED")
        strangers = set(header.receivers) - self._here
        if strangers or not header.receivers:
            raise ProtocolError(f"receivers {sorted(strangers)[:20]} are not hosted here", "NOT_FOUND")
        stream = (header.sender, tuple(header.receivers), header.kind)
        size = header.payload_bytes
        checksum = header.checksum
        return Incoming(frame.sequence, stream, plan, size, checksum, frame.checksum_last, header.receivers)

    def _announced_note(self, sequence: int, note: Note) -> Incoming:
        most = min(self._limits.max_note_bytes, self._limits.memory_budget_bytes)
        if note.payload_bytes > most:
            raise ProtocolError(
                f"note of {note.payload_bytes} bytes, at most {most} are taken", "RESOURCE_EXHAUSTED"
            )
        return Incoming(sequence, "note", note, note.payload_bytes, note.checksum)

    def _make_room(self, incoming: Incoming) -> None:
        if incoming.closed:
            self._memory.give_back(incoming.size)
            return
        incoming.buffer = self._memory.buffer(incoming.size)
        if incoming.rewound_at == 0:
            self._reply(Receipt(incoming.sequence, 0, rewind=True))

    def _take(self, incoming: Incoming, chunk: bytes | memoryview) -> None:
        assert incoming.buffer is not None
        end = incoming.received + len(chunk)
        if end > incoming.size:
            self._drop(incoming, ProtocolError(f"{end} bytes come, {incoming.size} were announced"))
            return
        incoming.buffer[incoming.received : end] = chunk
        incoming.running_checksum = zlib.crc32(chunk, incoming.running_checksum)
        incoming.received = end
        if end == incoming.size and not incoming.complete:
            self._complete(incoming, incoming.buffer)
        elif end < incoming.size:
            self._reply(Receipt(incoming.sequence, end, came_us=clock_us(asyncio.get_running_loop().time())))

    def _complete(self, incoming: Incoming, buffer: memoryview) -> None:
        try:
            if incoming.running_checksum != incoming.checksum:
                raise ProtocolError("the payload fails its checksum", "DATA_LOSS")
            if isinstance(incoming.plan, Plan):
                incoming.message = self._codec.rebuild(incoming.plan, buffer)
        except ProtocolError as error:
            self._drop(incoming, error)
            return
        incoming.complete = True
        self._deliver(incoming.stream)

    def _deliver(self, stream: Hashable) -> None:
        """Hand over what is complete and has nothing of its stream before it."""
        line = self._order.get(stream)
        while line and (line[0].closed or line[0].complete):
            incoming = line.popleft()
            if incoming.closed:
                continue
            self._delivered[stream] = incoming.sequence
            self._close(incoming)
            if self.keeps and isinstance(incoming.plan, Plan):
                self._kept[incoming.sequence] = incoming.size
            self._hand_over(incoming)
            self._reply(self._done(incoming))
        if not line:
            self._order.pop(stream, None)

    def _done(self, incoming: Incoming) -> Receipt:
        kept = incoming.sequence in self._kept
        return Receipt(incoming.sequence, incoming.size, delivered=True, kept=kept)

    def _hand_over(self, incoming: Incoming) -> None:
        if isinstance(incoming.plan, Note):
            assert incoming.buffer is not None
            self._on_note(incoming.plan.kind, bytes(incoming.buffer))
            return
        assert incoming.message is not None
        for receiver in incoming.receivers:
            self._on_message(receiver, incoming.message, incoming.sequence)

    def _drop(self, incoming: Incoming, error: ProtocolError) -> None:
        self._close(incoming)
        self._refuse(incoming.sequence, error)
        self._deliver(incoming.stream)

    def _refuse(self, sequence: int, error: ProtocolError) -> None:
        log.warning("refused message %d from %s: %s: %s", sequence, self._peer, error.code, error)
        status = grpc.StatusCode[error.code].value[0]
        self._reply(Receipt(sequence, 0, status=status, reason=str(error)[:500]))

    def _close(self, incoming: Incoming) -> None:
        incoming.closed = True
        if self._open.pop(incoming.sequence, None) is not None and incoming.buffer is not None:
            self._memory.give_back(incoming.size)
