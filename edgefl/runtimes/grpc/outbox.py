"""All that goes to one process: which frame leaves next, and what becomes of each message."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import grpc

from edgefl.errors import ProtocolError
from edgefl.runtimes.grpc import frames
from edgefl.runtimes.grpc.frames import Cancel, Data, Frame, Receipt, Start
from edgefl.runtimes.grpc.limits import SMALL_BYTES, Limits
from edgefl.runtimes.grpc.outgoing import Outgoing
from edgefl.runtimes.grpc.pacing import LinkEstimate

_FIRST_CHUNK_BYTES = 64 * 1024
"""Before the rate of a link is known."""
_LEAST_CHUNK_BYTES = 512
_PER_LATE_S = 4.0
"""Seconds of the link that may be under way for each second that receipts are late. A ring of four on links
of 1 MB/s took 2.6 s a round with 2, 2.2 s with 3, and 2.0 s with 4, as over plain TCP."""
_MOST_TOGETHER = 64
"""Receipts and the like that leave as one message of the stream."""
CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(slots=True)
class Job:
    """One frame that is about to leave, and the message that it belongs to (None: a receipt or the like)."""

    data: bytes
    message: Outgoing | None = None
    end: int = 0
    num_bytes: int = 0
    ahead: Sequence[Frame] = ()
    """Frames that `data` begins with, and that have nothing to do with the message."""


class Outbox:
    """Messages to one process. They outlive connections: `begin` starts them over on a new one.

    What the receiver has and cannot yet answer for (it may be restarted from before) is kept, and offered
    again on each new connection.

    Messages of one stream leave one after the other; those of different streams take turns frame by frame,
    small ones first. `on_sent` is told when the last byte of a message has left.
    """

    def __init__(
        self, limits: Limits, uplink_bytes_per_s: float | None, on_sent: Callable[[Outgoing], None]
    ) -> None:
        self._limits, self._uplink, self._on_sent = limits, uplink_bytes_per_s, on_sent
        self.messages: dict[int, Outgoing] = {}
        self.kept: dict[int, Outgoing] = {}
        self.wake = asyncio.Event()
        """Set when there may be a frame to send."""
        self.quiet = asyncio.Event()
        """Set while nothing is under way."""
        self.quiet.set()
        self._urgent: deque[Frame] = deque()
        self._replies: deque[Frame] = deque()
        self._together = False
        self._streams: dict[Hashable, deque[Outgoing]] = {}
        self._small: deque[Outgoing] = deque()
        self._large: deque[Outgoing] = deque()
        self._paced: list[tuple[float, int, Outgoing]] = []
        self._small_run = 0
        self._link = LinkEstimate()

    def add(self, message: Outgoing, now: float) -> None:
        """Queue a message behind those of its stream."""
        message.paced_until = now
        self.messages[message.sequence] = message
        self.quiet.clear()
        self._line_up(message, now)

    def urge(self, frame: Frame) -> None:
        """Send a small frame before all messages."""
        self._urgent.append(frame)
        self.wake.set()

    def reply(self, receipt: Receipt) -> None:
        """Send a receipt: at once where the sender waits for it to go on, otherwise with the next message."""
        if not receipt.delivered:
            self.urge(receipt)
            return
        self._replies.append(receipt)
        self.wake.set()

    @property
    def only_replies(self) -> bool:
        """Whether receipts of deliveries are all that there is to send."""
        return bool(self._replies) and not (self._urgent or self._small or self._large)

    def begin(self, now: float, *, together: bool = False) -> None:
        """Start over on a new connection: receipts are void, lossy messages lost, all others unconfirmed.

        together: the other side takes several frames in one message of the stream.
        """
        self._together = together
        cancels = [frame for frame in self._urgent if isinstance(frame, Cancel)]
        self._clear()
        self._urgent.extend(cancels)
        self._link = LinkEstimate()
        self._offer_again()
        for message in list(self.messages.values()):
            if message.lossy and message.started:
                self._finish(message, None)
                continue
            message.forget()
            self._line_up(message, now)
        self.wake.set()

    def begun(self) -> tuple[int, ...]:
        """Sequences of the messages that the receiver may have heard of."""
        begun = (m.sequence for m in self.messages.values() if m.started or m.resumed)
        return (*self.kept, *begun)

    def fail(self, error: Exception) -> None:
        """Give all messages up."""
        self.kept.clear()
        for message in list(self.messages.values()):
            self._finish(message, error)
        self._clear()

    def cancel(self, message: Outgoing, now: float) -> bool:
        """Withdraw a message; False when its last byte has left already."""
        if message.left or message.closed:
            return False
        if message.started or message.resumed:
            self.urge(Cancel(message.sequence))
        self._close(message)
        self._next_of_stream(message, now)
        return True

    def receipt(self, frame: Receipt, now: float) -> None:
        """Take in what the receiver says of a message; of one that is no longer here, nothing."""
        message = self.messages.get(frame.sequence)
        if message is None:
            if frame.delivered and not frame.kept:
                self.kept.pop(frame.sequence, None)
            return
        if frame.received > message.size:
            raise ProtocolError(f"a receipt for {frame.received} of {message.size} bytes")
        if frame.status:
            code = CODE_NAMES.get(frame.status, "UNKNOWN")
            self._settle(message, ProtocolError(frame.reason, code), now)
            return
        self._measure(message, frame, now)
        if frame.delivered:
            self._settle(message, None, now)
            if frame.kept:
                self.kept[message.sequence] = message
            return
        message.granted = True
        message.received = frame.received
        if frame.rewind:
            message.sent = frame.received
            message.marks.clear()
        message.sent = max(message.sent, frame.received)
        self._go_on(message, now)

    def _offer_again(self) -> None:
        """Line up what is kept before what is under way: the receiver says of each whether it needs it."""
        for message in self.kept.values():
            message.closed, message.on_delivered = False, _nobody_waits
        again = sorted((self.kept | self.messages).items())
        self.kept, self.messages = {}, dict(again)
        if self.messages:
            self.quiet.clear()

    def next_due(self) -> float | None:
        """When the next paced frame may leave."""
        return self._paced[0][0] if self._paced else None

    def choose(self, now: float) -> Job | None:
        """The frame that leaves next, or None while there is none."""
        while self._paced and self._paced[0][0] <= now:
            self._ready(heapq.heappop(self._paced)[2])
        ahead = self._ahead()
        alone = ahead and not (self._together and self._small)
        message = None if alone else self._pick()
        if message is not None:
            return self._frame(message, ahead)
        return Job(frames.write(*ahead)) if ahead else None

    def left(self, job: Job, now: float) -> None:
        """The frame has left."""
        message = job.message
        if message is None or message.closed:
            return
        message.marks.append((job.end, job.num_bytes, self._link.mark(now)))
        self._go_on(message, now)

    def _go_on(self, message: Outgoing, now: float) -> None:
        """Line the message's next frame up, or if it has none, the next message of its stream."""
        if not message.all_sent:
            self._enqueue(message, now)
            return
        self._has_left(message)
        if message.lossy:
            self._finish(message, None)
        self._next_of_stream(message, now)

    def _ahead(self) -> list[Frame]:
        """Receipts and the like that leave next: all, or one for a process that takes no more at a time."""
        most = _MOST_TOGETHER if self._together else 1
        found: list[Frame] = []
        for queue in (self._urgent, self._replies):
            while queue and len(found) < most:
                found.append(queue.popleft())
        return found

    def _pick(self) -> Outgoing | None:
        """Small messages first, but after 1 MiB of them a large one has its turn."""
        while self._small or self._large:
            large_is_due = self._small_run >= self._limits.frame_bytes and self._large
            queue = self._large if large_is_due or not self._small else self._small
            message = queue.popleft()
            message.queued = False
            if message.closed or message.all_sent:
                continue
            self._small_run += len(message.header) + message.num_remaining
            if queue is self._large:
                self._small_run = 0
            return message
        return None

    def _frame(self, message: Outgoing, ahead: Sequence[Frame]) -> Job:
        """The next frame of a message, behind what leaves with it."""
        size = self._chunk_bytes(message)
        frame = self._data(message, size) if message.started else self._start(message, size)
        num_bytes = len(frame.chunk)
        message.sent += num_bytes
        return Job(frames.write(*ahead, frame), message, message.sent, num_bytes, ahead)

    def _data(self, message: Outgoing, size: int) -> Data:
        offset, chunk = message.sent, message.chunk(message.sent, size)
        end = offset + len(chunk)
        checksum = message.checksum_at(end, chunk) if message.checksum_last else 0
        return Data(message.sequence, offset, chunk, checksum if end == message.size else 0)

    def _start(self, message: Outgoing, size: int) -> Start:
        message.started = True
        with_chunk = self._unasked(message) and not message.resumed
        chunk = message.chunk(0, size) if with_chunk and message.size else b""
        message.granted = with_chunk
        return Start(
            message.sequence, message.header, chunk, message.resumed, message.note, message.checksum_last
        )

    def _unasked(self, message: Outgoing) -> bool:
        """Whether a message is small enough to be sent before the receiver has made room for it."""
        return message.size <= self._limits.frame_bytes

    def _rate(self, message: Outgoing) -> float | None:
        """The rate that is set for this message's frames, if any."""
        rates = [r for r in (message.rate_bytes_per_s, self._uplink) if r is not None]
        return min(rates, default=None)

    def _chunk_bytes(self, message: Outgoing) -> int:
        """Payload of the next frame: what the link carries in 20 ms, at most 1 MiB."""
        rate = self._rate(message) or self._link.rate_bytes_per_s
        if rate is None:
            return min(_FIRST_CHUNK_BYTES, self._limits.frame_bytes)
        return min(self._limits.frame_bytes, max(_LEAST_CHUNK_BYTES, int(rate * self._limits.frame_s)))

    def _has_credit(self, message: Outgoing) -> bool:
        """Two frames of a message may be under way, and what fills the way while they travel.

        Receipts that are late, for traffic in the other direction, let more be under way: otherwise the
        direction that has less on its way would be held back more and more.
        """
        rate = self._rate(message)
        if rate is not None and self._unasked(message):
            return True
        rate = rate or self._link.rate_bytes_per_s or 0.0
        window = 2 * self._chunk_bytes(message) + int(rate * (self._link.rtt_s or 0.0))
        window += min(int(rate * _PER_LATE_S * self._link.late_s), 2 * self._limits.frame_bytes)
        return message.sent - message.received < window

    def _clear(self) -> None:
        self._urgent.clear()
        self._replies.clear()
        self._small.clear()
        self._large.clear()
        self._paced.clear()
        self._streams.clear()

    def _line_up(self, message: Outgoing, now: float) -> None:
        stream = self._streams.setdefault(message.stream, deque())
        stream.append(message)
        if stream[0] is message:
            self._enqueue(message, now)

    def _next_of_stream(self, message: Outgoing, now: float) -> None:
        """Let the next message of a stream go, when the first has left or is closed."""
        stream = self._streams.get(message.stream)
        while stream and (stream[0].closed or stream[0].all_sent):
            stream.popleft()
        if stream:
            self._enqueue(stream[0], now)
        else:
            self._streams.pop(message.stream, None)

    def _enqueue(self, message: Outgoing, now: float) -> None:
        """Put a message in line if it has something to send, and may."""
        if message.closed or message.queued:
            return
        if message.started and not (
            message.granted and message.num_remaining > 0 and self._has_credit(message)
        ):
            return
        message.queued = True
        rate = message.rate_bytes_per_s
        if rate is None:
            self._ready(message)
            return
        num_bytes = min(self._chunk_bytes(message), message.num_remaining)
        if not message.started:
            num_bytes = len(message.header) + (num_bytes if self._unasked(message) else 0)
        message.paced_until = max(message.paced_until, now - self._limits.frame_s) + num_bytes / rate
        heapq.heappush(self._paced, (message.paced_until, message.sequence, message))
        self.wake.set()

    def _ready(self, message: Outgoing) -> None:
        (self._small if message.num_remaining <= SMALL_BYTES else self._large).append(message)
        self.wake.set()

    def _measure(self, message: Outgoing, frame: Receipt, now: float) -> None:
        while message.marks and message.marks[0][0] <= frame.received:
            end, num_bytes, mark = message.marks.popleft()
            sustained = num_bytes > 0 and end < message.size
            self._link.receipt(num_bytes, mark, now, sustained=sustained)
        if frame.came_us:
            self._link.returned(frame.came_us, now)

    def _has_left(self, message: Outgoing) -> None:
        if not message.left:
            message.left = True
            self._on_sent(message)
            asyncio.get_running_loop().call_soon(message.on_left)

    def _settle(self, message: Outgoing, error: Exception | None, now: float) -> None:
        self._finish(message, error)
        self._next_of_stream(message, now)

    def _finish(self, message: Outgoing, error: Exception | None) -> None:
        if error is None:
            self._has_left(message)
        elif not message.left:
            asyncio.get_running_loop().call_soon(message.on_left)
        self._close(message)
        asyncio.get_running_loop().call_soon(message.on_delivered, error)

    def _close(self, message: Outgoing) -> None:
        if not message.left and message.started:
            self._on_sent(message)
        message.closed = True
        self.messages.pop(message.sequence, None)
        if not self.messages:
            self.quiet.set()


def _nobody_waits(_: Exception | None) -> None:
    """Its delivery has been told before."""


class Handle:
    """One message on its way."""

    def __init__(self, outbox: Outbox, message: Outgoing) -> None:
        self._outbox, self._message = outbox, message

    def cancel(self) -> bool:
        """Withdraw the message: what has left stays counted, the receiver sees nothing, nobody is called.

        Returns False, and changes nothing, when its last byte has left.
        """
        return self._outbox.cancel(self._message, asyncio.get_running_loop().time())
