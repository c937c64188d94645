"""One message on its way out."""

from __future__ import annotations

import bisect
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from edgefl.runtimes.grpc.frames import Note

OnLeft = Callable[[], None]
OnDelivered = Callable[[Exception | None], None]


@dataclass(eq=False, slots=True)
class Outgoing:
    """A message or note with its state of transmission.

    stream: messages of one stream keep their order. payload: views, sent as one run of bytes.
    sent, received: bytes of the payload that have left, and that the receiver is known to have.
    checksum_last: the payload's checksum is made as it leaves, and goes with its last bytes.
    """

    sequence: int
    stream: Hashable
    header: bytes
    note: Note | None
    payload: Sequence[memoryview]
    lossy: bool
    rate_bytes_per_s: float | None
    on_left: OnLeft
    on_delivered: OnDelivered
    checksum_last: bool = False
    size: int = 0
    sent: int = 0
    received: int = 0
    started: bool = False
    resumed: bool = False
    granted: bool = False
    """Whether the receiver waits for data; until then, only a first chunk is sent along."""
    queued: bool = False
    left: bool = False
    closed: bool = False
    """Nothing of it is to be sent: it is over, or kept only for the receiver's return."""
    paced_until: float = 0.0
    """When the bytes sent so far have left, at the transmission's own rate."""
    marks: deque[tuple[int, int, tuple[float, int]]] = field(default_factory=deque)
    """(end, bytes, mark) of each frame that the receiver has not confirmed."""
    _ends: list[int] = field(default_factory=list)
    _checksum: int = 0
    _checked: int = 0
    """Bytes of the payload that the checksum covers."""

    def __post_init__(self) -> None:
        self._ends = list(itertools.accumulate(map(len, self.payload)))
        self.size = self._ends[-1] if self._ends else 0

    @property
    def num_remaining(self) -> int:
        return self.size - self.sent

    @property
    def all_sent(self) -> bool:
        """Whether nothing of it is left to send on this connection."""
        return self.started and self.sent >= self.size and (self.granted or not self.size)

    def chunk(self, offset: int, num_bytes: int) -> bytes | memoryview:
        """Bytes of the payload; a view, unless they lie across two tensors."""
        parts: list[memoryview] = []
        at = bisect.bisect_right(self._ends, offset)
        end = min(offset + num_bytes, self.size)
        while offset < end:
            begin = self._ends[at] - len(self.payload[at])
            part = self.payload[at][offset - begin : end - begin]
            parts.append(part)
            offset += len(part)
            at += 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def checksum_at(self, end: int, last: bytes | memoryview) -> int:
        """CRC-32 of the payload up to `end`, whose last bytes are `last`. What has been covered stays so when
        bytes are sent again.
        """
        if self._checked < end:
            self._checksum = zlib.crc32(last[self._checked - end :], self._checksum)
            self._checked = end
        return self._checksum

    def forget(self) -> None:
        """Begin again in a new stream."""
        self.resumed = self.resumed or self.started
        self.started = self.granted = self.queued = False
        self.sent = self.received = 0
        self.marks.clear()
