"""The frames of an exchange stream, read and written by hand in protobuf's wire format.

protos/edgefl/v1/exchange.proto says what each means. By hand, because a generated class copies a chunk of
1 MiB four times between the tensor and the socket, and a view copies it once; the bytes are the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edgefl.errors import ProtocolError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_U64, _U32 = struct.Struct("<Q"), struct.Struct("<I")
_KEY_U64, _KEY_U32 = struct.Struct("<BQ"), struct.Struct("<BI")
_ONE_BYTE = [bytes((value,)) for value in range(0x80)]
_Value = int | memoryview


@dataclass(frozen=True, slots=True)
class Hello:
    """Who opens the stream. nodes: ids that the process hosts; lives: of each; instance: of the process;
    open: sequences of the messages that it has begun and goes on with. revision: of the protocol's form.
    """

    protocol_version: int
    run_id: str
    experiment_digest: str
    process: int
    nodes: tuple[int, ...]
    lives: tuple[int, ...]
    instance: bytes
    open: tuple[int, ...] = ()
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Nothing more follows, and nothing more will be received."""


@dataclass(frozen=True, slots=True)
class Note:
    """What announces a small text between processes."""

    kind: str
    payload_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Start:
    """Begins a message (header) or a note, or goes on with one (resumed); chunk: its first bytes, or none.

    checksum_last: it comes with the last chunk, the one in the header is void.
    """

    sequence: int
    header: bytes | memoryview = b""
    chunk: bytes | memoryview = b""
    resumed: bool = False
    note: Note | None = None
    checksum_last: bool = False


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of a payload from `offset` on; checksum: of the whole payload, with its last bytes."""

    sequence: int
    offset: int
    chunk: bytes | memoryview
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the receiver has of a message; status: a gRPC status code that is not 0 refuses it.

    kept: delivered, but the receiver may have to come back to before it; a later receipt without it frees it.
    came_us: when the last of these bytes came, in us of the receiver's clock modulo 2^32; 0: unsaid.
    """

    sequence: int
    received: int
    delivered: bool = False
    rewind: bool = False
    status: int = 0
    reason: str = ""
    kept: bool = False
    came_us: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """The sender withdraws a message."""

    sequence: int


Frame = Hello | Goodbye | Start | Data | Receipt | Cancel


def write(*together: Frame) -> bytes:
    """Frames as the bytes of one edgefl.v1.Frame after the other; one join is the only copy of a chunk."""
    pieces: list[bytes | memoryview] = []
    for frame in together:
        number, parts = _content(frame)
        pieces += (_key(number, _BYTES), _varint(sum(map(len, parts))), *parts)
    return b"".join(pieces)


def read(data: bytes) -> list[Frame]:
    """The frames that these bytes are; chunks are views of `data`. Raises ProtocolError if they are none."""
    found: list[Frame] = []
    for number, body in _fields(memoryview(data)):
        reader = _READERS.get(number)
        if reader is not None:
            found.append(reader(_group(_message(body))))
    if not found:
        raise ProtocolError("not a frame: it has no body that this version knows")
    return found


def _content(frame: Frame) -> tuple[int, Sequence[bytes | memoryview]]:
    """Number of a frame's body, and what it is made of."""
    match frame:
        case Data(sequence, offset, chunk, checksum):
            own = (_fixed64(1, sequence), _fixed64(2, offset))
            return 1, (*own, *_bytes(3, chunk), _fixed32(4, checksum))
        case Receipt():
            return 2, _receipt(frame)
        case Start():
            return 3, _start(frame)
        case Cancel(sequence):
            return 4, (_fixed64(1, sequence),)
        case Hello():
            return 5, _hello(frame)
        case Goodbye():
            return 6, ()


def _receipt(frame: Receipt) -> list[bytes | memoryview]:
    return [
        _fixed64(1, frame.sequence),
        _fixed64(2, frame.received),
        _truth(3, frame.delivered),
        _truth(4, frame.rewind),
        _fixed32(5, frame.status),
        *_bytes(6, frame.reason.encode()),
        _truth(7, frame.kept),
        _fixed32(8, frame.came_us),
    ]


def _start(frame: Start) -> list[bytes | memoryview]:
    parts = [
        _fixed64(1, frame.sequence),
        *_bytes(2, frame.header),
        *_bytes(3, frame.chunk),
        _truth(4, frame.resumed),
    ]
    if frame.note is not None:
        note = frame.note
        inner = [*_bytes(1, note.kind.encode()), _fixed64(2, note.payload_bytes), _fixed32(3, note.checksum)]
        parts += _bytes(5, b"".join(inner))
    parts.append(_truth(6, frame.checksum_last))
    return parts


def _hello(frame: Hello) -> list[bytes | memoryview]:
    return [
        _fixed32(1, frame.protocol_version),
        *_bytes(2, frame.run_id.encode()),
        *_bytes(3, frame.experiment_digest.encode()),
        _fixed32(4, frame.process),
        *_bytes(5, struct.pack(f"<{len(frame.nodes)}i", *frame.nodes)),
        *_bytes(6, struct.pack(f"<{len(frame.lives)}i", *frame.lives)),
        *_bytes(7, frame.instance),
        *_bytes(8, struct.pack(f"<{len(frame.open)}Q", *frame.open)),
        _fixed32(9, frame.revision),
    ]


def _key(number: int, wire_type: int) -> bytes:
    return _ONE_BYTE[number << 3 | wire_type]


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _ONE_BYTE[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _fixed64(number: int, value: int) -> bytes:
    return _KEY_U64.pack(number << 3 | _FIXED64, value) if value else b""


def _fixed32(number: int, value: int) -> bytes:
    return _KEY_U32.pack(number << 3 | _FIXED32, value) if value else b""


def _truth(number: int, value: bool) -> bytes:
    return _ONE_BYTE[number << 3] + b"\x01" if value else b""


def _bytes(number: int, value: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    return (_key(number, _BYTES) + _varint(len(value)), value) if len(value) else ()


def _fields(view: memoryview) -> Iterator[tuple[int, _Value]]:
    """(number, value) of every field; integers as they stand, all else as views."""
    at, end = 0, len(view)
    while at < end:
        key, at = _read_varint(view, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, at = _read_varint(view, at)
            yield number, value
            continue
        if wire_type == _BYTES:
            length, at = _read_varint(view, at)
        elif wire_type in (_FIXED64, _FIXED32):
            length = 8 if wire_type == _FIXED64 else 4
        else:
            raise ProtocolError(f"not a frame: wire type {wire_type}")
        begin, at = at, at + length
        if number == 0 or at > end:
            raise ProtocolError("not a frame: a field reaches beyond its end")
        if wire_type == _BYTES:
            yield number, view[begin:at]
        else:
            yield number, (_U64 if length == 8 else _U32).unpack_from(view, begin)[0]


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    if at < len(view) and view[at] < 0x80:
        return view[at], at + 1
    value = shift = 0
    while True:
        if at >= len(view) or shift > 63:
            raise ProtocolError("not a frame: it ends within a number")
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


class _Group:
    """The fields of one message by number; a missing one has its default, one of another type is refused."""

    def __init__(self, fields: dict[int, _Value]) -> None:
        self._fields = fields

    def number(self, number: int) -> int:
        value = self._fields.get(number, 0)
        if not isinstance(value, int):
            raise ProtocolError(f"not a frame: field {number} is no number")
        return value

    def view(self, number: int) -> memoryview:
        return _message(self._fields.get(number, memoryview(b"")))

    def text(self, number: int) -> str:
        try:
            return str(self.view(number), "utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"not a frame: field {number} is no text") from error

    def integers(self, number: int, form: str) -> tuple[int, ...]:
        """A packed list; form: of one item, as `struct` has it."""
        view, size = self.view(number), struct.calcsize("<" + form)
        if len(view) % size:
            raise ProtocolError(f"not a frame: field {number} holds no integers of {size} bytes")
        return struct.unpack(f"<{len(view) // size}{form}", view)


def _group(view: memoryview) -> _Group:
    return _Group(dict(_fields(view)))


def _message(value: _Value) -> memoryview:
    if isinstance(value, int):
        raise ProtocolError("not a frame: a number where a message or bytes belong")
    return value


def _read_start(g: _Group) -> Start:
    note = _read_note(g.view(5)) if g.view(5) else None
    return Start(g.number(1), g.view(2), g.view(3), bool(g.number(4)), note, bool(g.number(6)))


def _read_note(view: memoryview) -> Note:
    g = _group(view)
    return Note(g.text(1), g.number(2), g.number(3))


def _read_hello(g: _Group) -> Hello:
    return Hello(
        g.number(1),
        g.text(2),
        g.text(3),
        g.number(4),
        g.integers(5, "i"),
        g.integers(6, "i"),
        bytes(g.view(7)),
        g.integers(8, "Q"),
        g.number(9),
    )


_READERS: dict[int, Callable[[_Group], Frame]] = {
    1: lambda g: Data(g.number(1), g.number(2), g.view(3), g.number(4)),
    2: lambda g: Receipt(
        g.number(1),
        g.number(2),
        bool(g.number(3)),
        bool(g.number(4)),
        g.number(5),
        g.text(6),
        bool(g.number(7)),
        g.number(8),
    ),
    3: _read_start,
    4: lambda g: Cancel(g.number(1)),
    5: _read_hello,
    6: lambda g: Goodbye(),
}
