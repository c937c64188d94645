"""Messages to bytes and back, within bounds that are checked before memory is taken.

A message becomes a header (protobuf) and a payload (its tensors' bytes, one after the other). Nothing is
pickled: a header can only name message classes that both ends know, and their fields.
"""

from __future__ import annotations

import operator
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgefl.errors import ProtocolError, nearest
from edgefl.messages.base import Message, field_names
from edgefl.messages.hints import hints
from edgefl.messages.wire import DTYPES, Header, RawRef, TensorRef, TensorSpec, VectorRef, WireValue
from edgefl.parameters import Layout, Vector

MAX_HEADER_BYTES = 64 * 1024
LEAST_MAX_VALUES = 65_536
_CACHED_SIZES = 65_536
_INTEGERS = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message as it travels. payload: the bytes of its tensors, as views of their memory where possible.

    checked: whether the header holds the payload's checksum.
    """

    header: bytes
    payload: list[memoryview]
    checked: bool = True

    @property
    def payload_bytes(self) -> int:
        return sum(map(len, self.payload))

    @property
    def nbytes(self) -> int:
        """Header and payload: the encoded size."""
        return len(self.header) + self.payload_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """A header that has been checked: what message will come of `payload_bytes` more bytes."""

    kind: type[Message]
    header: Header

    @property
    def payload_bytes(self) -> int:
        return self.header.payload_bytes


class Codec:
    """Encodes and decodes the messages of one run.

    kinds: every message class of the run. layouts: every layout that a Vector of it may have.
    max_values: most values (or bytes) of a Tensor (or bytes) field whose class sets no max_size; unless
    given, four times the largest layout, and at least 65,536.
    Raises TypeError for a class whose fields cannot travel, or two of one name.
    """

    def __init__(
        self, kinds: Iterable[type[Message]], layouts: Iterable[Layout] = (), *, max_values: int | None = None
    ) -> None:
        if sys.byteorder != "little":
            raise NotImplementedError("tensors travel as little-endian bytes; this machine is big-endian")
        self.kinds: dict[str, type[Message]] = {}
        for kind in kinds:
            if self.kinds.setdefault(kind.__name__, kind) is not kind:
                raise TypeError(f"two message classes are named {kind.__name__}")
            hints(kind)
        self.layouts = {layout.digest: layout for layout in layouts}
        largest = max((layout.size for layout in self.layouts.values()), default=0)
        self.max_values = max_values if max_values is not None else max(4 * largest, LEAST_MAX_VALUES)
        self._readers = {kind: _reader(kind) for kind in self.kinds.values()}
        self._sizes: dict[tuple[Any, ...], tuple[int, int]] = {}

    def encode(
        self, message: Message, receivers: Sequence[int], sequence: int, *, checked_bytes: int | None = None
    ) -> Encoded:
        """The message as bytes for the nodes `receivers`. Tensors on the CPU are not copied.

        sequence: of the sending process, rising. checked_bytes: largest payload whose checksum is made here;
        the header of a larger one has 0 instead. None: any.
        Raises TypeError, naming class and field, for what cannot travel, ValueError for what is too large.
        """
        header, sources = self._draft(message, receivers, sequence)
        payload = [view for view in map(_bytes_of, sources) if view.nbytes]
        checked = checked_bytes is None or header.payload_bytes <= checked_bytes
        checksum = 0
        for view in payload if checked else ():
            checksum = zlib.crc32(view, checksum)
        header_bytes = header.to_bytes(checksum)
        self._check_header_size(message, len(header_bytes))
        return Encoded(header_bytes, payload, checked)

    def sizes(self, message: Message) -> tuple[int, int]:
        """Payload bytes (what papers count), and encoded bytes: header and payload of the message to one
        receiver, exactly, without encoding it.

        One dictionary lookup, but for the first message of its kind, dtypes, shapes and text lengths.
        Raises as `encode` does.
        """
        kind = message.__class__
        reader = self._readers.get(kind)
        key = (kind, *[_signature(value) for value in reader(message)]) if reader is not None else (kind,)
        return self._sizes.get(key) or self._measure(message, key)

    def check_header(self, data: bytes | memoryview, *, memory_bytes: int | None = None) -> Plan:
        """Hold a header against its message class before any memory is taken for the payload.

        memory_bytes: most bytes of payload that the receiver takes.
        Raises ProtocolError with the gRPC status that refuses it: UNIMPLEMENTED (unknown kind),
        RESOURCE_EXHAUSTED (too large), FAILED_PRECONDITION (other layout or protocol), INVALID_ARGUMENT.
        """
        if len(data) > MAX_HEADER_BYTES:
            raise ProtocolError(
                f"header of {len(data)} bytes, at most {MAX_HEADER_BYTES} are taken", "RESOURCE_EXHAUSTED"
            )
        header = Header.from_bytes(data)
        kind = self.kinds.get(header.kind)
        if kind is None:
            raise ProtocolError(
                f"unknown message kind {header.kind[:80]!r}: {nearest(header.kind[:80], self.kinds)}",
                "UNIMPLEMENTED",
            )
        self._check_fields(kind, header)
        self._check_tensors(kind, header)
        if memory_bytes is not None and header.payload_bytes > memory_bytes:
            raise ProtocolError(
                f"{header.kind} of {header.payload_bytes} bytes, at most {memory_bytes} are taken",
                "RESOURCE_EXHAUSTED",
            )
        return Plan(kind, header)

    def rebuild(self, plan: Plan, payload: memoryview | bytearray) -> Message:
        """The message of a checked header and its whole payload; its tensors are views of the payload.

        A tensor whose place in the payload is not a multiple of its item size is copied, and so are
        booleans. Raises ProtocolError when the class itself refuses the values.
        """
        view = memoryview(payload).cast("B")
        parts, offset = [], 0
        for spec in plan.header.tensors:
            parts.append((view[offset : offset + spec.nbytes], spec, offset))
            offset += spec.nbytes
        values = {name: self._resolve(value, parts) for name, value in plan.header.fields}
        try:
            message = plan.kind(**values)
        except Exception as error:
            raise ProtocolError(f"{plan.header.kind} refuses its values: {error}") from error
        return message.stamped(plan.header.sender, plan.header.life)

    def decode(self, header: bytes | memoryview, payload: memoryview | bytearray | bytes) -> Message:
        """The message of a header and its whole payload, both checked; see `check_header` and `rebuild`."""
        plan = self.check_header(header)
        view = memoryview(payload).cast("B")
        if view.nbytes != plan.payload_bytes:
            raise ProtocolError(f"payload of {view.nbytes} bytes, {plan.payload_bytes} were announced")
        if zlib.crc32(view) != plan.header.checksum:
            raise ProtocolError(f"the payload of {plan.header.kind} fails its checksum", "DATA_LOSS")
        return self.rebuild(plan, memoryview(bytearray(view)) if view.readonly else view)

    def _draft(
        self, message: Message, receivers: Sequence[int], sequence: int
    ) -> tuple[Header, list[Tensor | bytes]]:
        """The header, but for its checksum, and the tensors and bytes of the payload in order."""
        kind = type(message)
        if self.kinds.get(kind.__name__) is not kind:
            raise TypeError(
                f"{kind.__name__} is no message kind of this run: {nearest(kind.__name__, self.kinds)}"
            )
        sources: list[Tensor | bytes] = []
        specs: list[TensorSpec] = []
        fields = []
        for name, hint in hints(kind).items():
            where = f"{kind.__name__}.{name}"
            value = hint.fit(self._refer(getattr(message, name), where, sources, specs))
            if not hint.admits(value):
                raise TypeError(f"{where}: {hint.text} is needed, found {_shown(getattr(message, name))}")
            fields.append((name, value))
        payload_bytes = sum(spec.nbytes for spec in specs)
        header = Header(
            kind.__name__,
            message.sender,
            message.life,
            receivers,
            sequence,
            fields,
            specs,
            payload_bytes,
            checksum=0,
        )
        if (problem := self._oversized(kind, header)) is not None:
            raise ValueError(problem)
        return header, sources

    def _refer(
        self, value: Any, where: str, sources: list[Tensor | bytes], specs: list[TensorSpec]
    ) -> WireValue:
        """A field's value as the header holds it; appends what goes into the payload."""
        match value:
            case Vector():
                if value.layout.digest not in self.layouts:
                    raise TypeError(f"{where}: a Vector of a layout that this run's codec does not know")
                ref = VectorRef(value.layout.digest, len(sources), len(value.buffers))
                for tensor in (value.values, *value.buffers):
                    specs.append(_spec(tensor, where))
                    sources.append(tensor)
                return ref
            case Tensor():
                specs.append(_spec(value, where))
                sources.append(value)
                return TensorRef(len(sources) - 1)
            case bytes():
                specs.append(TensorSpec(torch.uint8, (len(value),)))
                sources.append(value)
                return RawRef(len(sources) - 1)
            case tuple():
                return tuple(self._refer(item, where, sources, specs) for item in value)
            case np.bool_() | np.integer() | np.floating():
                return self._refer(value.item(), where, sources, specs)
            case int() if value not in _INTEGERS:
                raise TypeError(f"{where}: an integer of 64 bits is needed, found {value}")
            case int() | float() | str() | None:
                return value
        raise TypeError(f"{where}: {_shown(value)} cannot travel")

    def _measure(self, message: Message, key: tuple[Any, ...]) -> tuple[int, int]:
        header, _ = self._draft(message, (0,), 0)
        header_bytes = header.num_bytes()
        self._check_header_size(message, header_bytes)
        if len(self._sizes) >= _CACHED_SIZES:
            self._sizes.clear()
        sizes = self._sizes[key] = header.payload_bytes, header_bytes + header.payload_bytes
        return sizes

    def _check_header_size(self, message: Message, num_bytes: int) -> None:
        if num_bytes > MAX_HEADER_BYTES:
            raise ValueError(
                f"{type(message).__name__}: its header takes {num_bytes} bytes, at most {MAX_HEADER_BYTES} "
                "travel; long tuples and texts belong into a tensor or bytes"
            )

    def _check_fields(self, kind: type[Message], header: Header) -> None:
        """Names and types of the fields, and the one use of each tensor in order."""
        names, expected = [name for name, _ in header.fields], field_names(kind)
        if sorted(names) != sorted(expected):
            raise ProtocolError(f"{header.kind} has the fields {list(expected)}, found {names[:50]}")
        for name, value in header.fields:
            if not hints(kind)[name].admits(value):
                raise ProtocolError(f"{header.kind}.{name}: {hints(kind)[name].text} is needed")
        used = 0
        for name, value in header.fields:
            used = self._check_refs(value, header.tensors, used, f"{header.kind}.{name}")
        if used != len(header.tensors):
            raise ProtocolError(f"{header.kind}: {len(header.tensors)} tensors come, {used} are used")

    def _check_refs(self, value: WireValue, specs: Sequence[TensorSpec], used: int, where: str) -> int:
        """Hold references against the tensors that come. Returns how many are used after this value."""
        if isinstance(value, tuple):
            for item in value:
                used = self._check_refs(item, specs, used, where)
            return used
        if not isinstance(value, TensorRef | RawRef | VectorRef):
            return used
        count = 1 + (value.num_buffers if isinstance(value, VectorRef) else 0)
        if value.index != used or used + count > len(specs):
            raise ProtocolError(f"{where}: tensor {value.index} is out of order or missing")
        if isinstance(value, VectorRef):
            self._check_vector(value, specs[used : used + count], where)
        elif isinstance(value, RawRef) and (specs[used].dtype != torch.uint8 or len(specs[used].shape) != 1):
            raise ProtocolError(f"{where}: bytes come as a flat uint8 tensor, found {specs[used]}")
        return used + count

    def _check_vector(self, ref: VectorRef, specs: Sequence[TensorSpec], where: str) -> None:
        layout = self.layouts.get(ref.digest)
        if layout is None:
            raise ProtocolError(
                f"{where}: a vector of an unknown layout; the peers disagree on the model",
                "FAILED_PRECONDITION",
            )
        needed = [TensorSpec(layout.dtype, (layout.size,))]
        needed += [TensorSpec(b.dtype, b.shape) for b in layout.buffers]
        if list(specs) != needed:
            raise ProtocolError(f"{where}: the tensors of this vector do not have its layout's shapes")

    def _check_tensors(self, kind: type[Message], header: Header) -> None:
        if (problem := self._oversized(kind, header)) is not None:
            raise ProtocolError(problem, "RESOURCE_EXHAUSTED")
        total = sum(spec.nbytes for spec in header.tensors)
        if total != header.payload_bytes:
            raise ProtocolError(
                f"{header.kind}: {header.payload_bytes} bytes are announced, its tensors take {total}"
            )

    def _oversized(self, kind: type[Message], header: Header) -> str | None:
        """What is larger than its bound, or None."""
        for name, value in header.fields:
            bound = kind.max_size.get(name)
            if bound is not None and isinstance(value, tuple | str) and len(value) > bound:
                return f"{header.kind}.{name}: {len(value)} items, at most {bound} are taken"
            plain = bound if not isinstance(value, tuple) else None
            most = plain if plain is not None else self.max_values
            for index in _plain_tensors(value):
                if header.tensors[index].numel > most:
                    found = header.tensors[index].numel
                    return f"{header.kind}.{name}: {found} values, at most {most} are taken (max_size)"
        return None

    def _resolve(self, value: WireValue, parts: Sequence[tuple[memoryview, TensorSpec, int]]) -> Any:
        """A field's value from the header's; parts: of the payload, one for each tensor."""
        match value:
            case tuple():
                return tuple(self._resolve(item, parts) for item in value)
            case TensorRef(index):
                return _tensor(*parts[index])
            case RawRef(index):
                return bytes(parts[index][0])
            case VectorRef(digest, index, num_buffers):
                values, *buffers = (_tensor(*part) for part in parts[index : index + 1 + num_buffers])
                return Vector(self.layouts[digest], values, tuple(buffers))
        return value


def _reader(kind: type[Message]) -> Callable[[Message], tuple[Any, ...]]:
    """A fast way to all fields of a message."""
    names = field_names(kind)
    if len(names) >= 2:
        return operator.attrgetter(*names)
    if names:
        (name,) = names
        return lambda message: (getattr(message, name),)
    return lambda message: ()


def _signature(value: Any) -> Any:
    """What the encoded size of a value depends on: its type, shape and length, as a dictionary key."""
    kind = value.__class__
    if kind is int:
        return kind if value in _INTEGERS else value
    if kind is Vector:
        return value.layout.digest
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    if kind is tuple:
        return tuple([_signature(item) for item in value])
    if kind is str:
        return -len(value) if value.isascii() else -len(value.encode())
    return (kind, len(value)) if kind is bytes else kind


def _plain_tensors(value: WireValue) -> list[int]:
    """Indices of the tensors and bytes in a value; a vector's layout bounds its own."""
    if isinstance(value, tuple):
        return [index for item in value for index in _plain_tensors(item)]
    return [value.index] if isinstance(value, TensorRef | RawRef) else []


def _spec(tensor: Tensor, where: str) -> TensorSpec:
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        raise TypeError(f"{where}: a {tensor.layout} tensor of {tensor.dtype} cannot travel")
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def _bytes_of(source: Tensor | bytes) -> memoryview:
    """The bytes of a source: a view, but for a tensor that is not contiguous or not on the CPU."""
    if isinstance(source, bytes):
        return memoryview(source)
    flat = source.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _tensor(view: memoryview, spec: TensorSpec, offset: int) -> Tensor:
    if not view.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    if offset % spec.dtype.itemsize:
        view = memoryview(bytearray(view))
    if spec.dtype is torch.bool:
        return torch.frombuffer(view, dtype=torch.uint8).ne(0).view(spec.shape)
    return torch.frombuffer(view, dtype=spec.dtype).view(spec.shape)


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, int | float | str | None) else ""
    return f"{type(value).__name__} {text[:60]}".strip()
