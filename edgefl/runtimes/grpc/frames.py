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
_Value = int | memoryview


@dataclass(frozen=True, slots=True)
class Hello:
    """Who opens the stream. nodes: ids that the process hosts; lives: of each; instance: of the process;
    open: sequences of the messages that it has begun and goes on with.
    """

    protocol_version: int
    run_id: str
    experiment_digest: str
    process: int
    nodes: tuple[int, ...]
    lives: tuple[int, ...]
    instance: bytes
    open: tuple[int, ...] = ()


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
    """Begins a message (header) or a note, or goes on with one (resumed); chunk: its first bytes, or none."""

    sequence: int
    header: bytes | memoryview = b""
    chunk: bytes | memoryview = b""
    resumed: bool = False
    note: Note | None = None


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of a payload from `offset` on."""

    sequence: int
    offset: int
    chunk: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the receiver has of a message; status: a gRPC status code that is not 0 refuses it.

    kept: delivered, but the receiver may have to come back to before it; a later receipt without it frees it.
    """

    sequence: int
    received: int
    delivered: bool = False
    rewind: bool = False
    status: int = 0
    reason: str = ""
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """The sender withdraws a message."""

    sequence: int


Frame = Hello | Goodbye | Start | Data | Receipt | Cancel


def write(frame: Frame) -> bytes:
    """A frame as the bytes of an edgefl.v1.Frame; a chunk is copied once."""
    match frame:
        case Data(sequence, offset, chunk):
            return _body(1, [_fixed64(1, sequence), _fixed64(2, offset), *_bytes(3, chunk)])
        case Receipt():
            return _body(2, _receipt(frame))
        case Start():
            return _body(3, _start(frame))
        case Cancel(sequence):
            return _body(4, [_fixed64(1, sequence)])
        case Hello():
            return _body(5, _hello(frame))
        case Goodbye():
            return _body(6, [])


def read(data: bytes) -> Frame:
    """The frame that these bytes are; chunks are views of `data`. Raises ProtocolError when they are none."""
    view = memoryview(data)
    frame: Frame | None = None
    for number, body in _fields(view):
        reader = _READERS.get(number)
        if reader is not None:
            frame = reader(_group(_message(body)))
    if frame is None:
        raise ProtocolError("not a frame: it has no body that this version knows")
    return frame


def _receipt(frame: Receipt) -> list[bytes | memoryview]:
    return [
        _fixed64(1, frame.sequence),
        _fixed64(2, frame.received),
        _truth(3, frame.delivered),
        _truth(4, frame.rewind),
        _fixed32(5, frame.status),
        *_bytes(6, frame.reason.encode()),
        _truth(7, frame.kept),
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
    ]


def _body(number: int, parts: Sequence[bytes | memoryview]) -> bytes:
    """A frame whose body has this number; one join is the only copy of its chunk."""
    return b"".join((_key(number, _BYTES), _varint(sum(map(len, parts))), *parts))


def _key(number: int, wire_type: int) -> bytes:
    return bytes((number << 3 | wire_type,))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _fixed64(number: int, value: int) -> bytes:
    return _key(number, _FIXED64) + _U64.pack(value) if value else b""


def _fixed32(number: int, value: int) -> bytes:
    return _key(number, _FIXED32) + _U32.pack(value) if value else b""


def _truth(number: int, value: bool) -> bytes:
    return bytes((number << 3, 1)) if value else b""


def _bytes(number: int, value: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    return (_key(number, _BYTES) + _varint(len(value)), value) if len(value) else ()


def _fields(view: memoryview) -> Iterator[tuple[int, _Value]]:
    """(number, value) of every field; integers as they stand, all else as views."""
    at = 0
    while at < len(view):
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
        if number == 0 or at + length > len(view):
            raise ProtocolError("not a frame: a field reaches beyond its end")
        part = view[at : at + length]
        yield number, part if wire_type == _BYTES else int.from_bytes(part, "little")
        at += length


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
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
    note = g.view(5)
    return Start(g.number(1), g.view(2), g.view(3), bool(g.number(4)), _read_note(note) if note else None)


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
    )


_READERS: dict[int, Callable[[_Group], Frame]] = {
    1: lambda g: Data(g.number(1), g.number(2), g.view(3)),
    2: lambda g: Receipt(
        g.number(1),
        g.number(2),
        bool(g.number(3)),
        bool(g.number(4)),
        g.number(5),
        g.text(6),
        bool(g.number(7)),
    ),
    3: _read_start,
    4: lambda g: Cancel(g.number(1)),
    5: _read_hello,
    6: lambda g: Goodbye(),
}
