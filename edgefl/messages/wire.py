"""The header of a message as bytes. The one module that touches generated protobuf types.

protos/edgefl/v1/envelope.proto says what each field means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from google.protobuf.message import DecodeError

from edgefl.errors import ProtocolError
from edgefl.messages.v1 import envelope_pb2, exchange_pb2, probe_pb2

PROTOCOL_VERSION = 1
EXCHANGE_SERVICE: str = exchange_pb2.DESCRIPTOR.services_by_name["ExchangeService"].full_name
"""Full name of the service; importing this module also makes it known to gRPC's reflection."""
PROBE_SERVICE: str = probe_pb2.DESCRIPTOR.services_by_name["ProbeService"].full_name
EchoRequest, EchoResponse = probe_pb2.EchoRequest, probe_pb2.EchoResponse
UploadRequest, UploadResponse = probe_pb2.UploadRequest, probe_pb2.UploadResponse
DownloadRequest, DownloadResponse = probe_pb2.DownloadRequest, probe_pb2.DownloadResponse

_CODES = {
    torch.float32: envelope_pb2.DTYPE_FLOAT32,
    torch.float64: envelope_pb2.DTYPE_FLOAT64,
    torch.float16: envelope_pb2.DTYPE_FLOAT16,
    torch.bfloat16: envelope_pb2.DTYPE_BFLOAT16,
    torch.int8: envelope_pb2.DTYPE_INT8,
    torch.int16: envelope_pb2.DTYPE_INT16,
    torch.int32: envelope_pb2.DTYPE_INT32,
    torch.int64: envelope_pb2.DTYPE_INT64,
    torch.uint8: envelope_pb2.DTYPE_UINT8,
    torch.bool: envelope_pb2.DTYPE_BOOL,
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
DTYPES = frozenset(_CODES)
"""What a tensor that travels may hold."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the payload."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A field's value: the tensor of this index."""

    index: int


@dataclass(frozen=True, slots=True)
class RawRef:
    """A field's value: the bytes that the uint8 tensor of this index holds."""

    index: int


@dataclass(frozen=True, slots=True)
class VectorRef:
    """A field's value: a vector of a known layout; its values at this index, its buffers after them."""

    digest: int
    index: int
    num_buffers: int


WireValue = int | float | bool | str | None | tuple[Any, ...] | TensorRef | RawRef | VectorRef


@dataclass(frozen=True, slots=True)
class Header:
    """All that is known of a message before its payload comes."""

    kind: str
    sender: int
    life: int
    receivers: Sequence[int]
    sequence: int
    fields: Sequence[tuple[str, WireValue]]
    tensors: Sequence[TensorSpec]
    payload_bytes: int
    checksum: int

    def to_bytes(self, checksum: int | None = None) -> bytes:
        """The header as protobuf, with this checksum instead of its own.

        Raises ValueError when an integer does not fit its field.
        """
        data: bytes = self._proto(self.checksum if checksum is None else checksum).SerializeToString()
        return data

    def num_bytes(self) -> int:
        """len(to_bytes()), without making them."""
        size: int = self._proto(self.checksum).ByteSize()
        return size

    def _proto(self, checksum: int) -> Any:
        header = envelope_pb2.Header(
            protocol_version=PROTOCOL_VERSION,
            kind=self.kind,
            sender=self.sender,
            life=self.life,
            receivers=self.receivers,
            sequence=self.sequence,
            payload_bytes=self.payload_bytes,
            checksum=checksum,
        )
        for name, value in self.fields:
            _put(header.fields.add(name=name).value, value)
        for spec in self.tensors:
            code = _CODES[spec.dtype]
            header.tensors.add(dtype=code, codec=envelope_pb2.TENSOR_CODEC_RAW, shape=spec.shape)
        return header

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Header:
        """Raises ProtocolError when `data` is no header, or one of another protocol version."""
        try:
            header = envelope_pb2.Header.FromString(bytes(data))
        except DecodeError as error:
            raise ProtocolError(f"not a message header: {error}") from error
        if header.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol version {header.protocol_version}, {PROTOCOL_VERSION} is needed",
                "FAILED_PRECONDITION",
            )
        return cls(
            header.kind,
            header.sender,
            header.life,
            tuple(header.receivers),
            header.sequence,
            tuple((field.name, _get(field.value)) for field in header.fields),
            tuple(map(_spec, header.tensors)),
            header.payload_bytes,
            header.checksum,
        )


def _put(proto: Any, value: WireValue) -> None:
    """Write one value; its type decides which member of the oneof it becomes."""
    match value:
        case bool():
            proto.truth = value
        case int():
            proto.integer = value
        case float():
            proto.real = value
        case str():
            proto.text = value
        case None:
            proto.none.SetInParent()
        case tuple():
            proto.tuple.SetInParent()
            for item in value:
                _put(proto.tuple.items.add(), item)
        case TensorRef(index):
            proto.tensor = index
        case RawRef(index):
            proto.raw = index
        case VectorRef(digest, index, num_buffers):
            vector = proto.vector
            vector.layout_digest, vector.tensor, vector.num_buffers = digest, index, num_buffers


def _get(proto: Any) -> WireValue:
    member = proto.WhichOneof("value")
    match member:
        case "integer" | "real" | "truth" | "text":
            plain: int | float | bool | str = getattr(proto, member)
            return plain
        case "none":
            return None
        case "tuple":
            return tuple(map(_get, proto.tuple.items))
        case "tensor":
            return TensorRef(proto.tensor)
        case "raw":
            return RawRef(proto.raw)
        case "vector":
            return VectorRef(proto.vector.layout_digest, proto.vector.tensor, proto.vector.num_buffers)
    raise ProtocolError("a field without a value, or of a type that this version does not know")


def _spec(proto: Any) -> TensorSpec:
    dtype = _DTYPES.get(proto.dtype)
    if dtype is None or proto.codec != envelope_pb2.TENSOR_CODEC_RAW:
        raise ProtocolError(f"tensor of dtype {proto.dtype} and codec {proto.codec}, unknown here")
    shape = tuple(proto.shape)
    if any(size < 0 for size in shape):
        raise ProtocolError(f"tensor of negative shape {shape}")
    return TensorSpec(dtype, shape)
