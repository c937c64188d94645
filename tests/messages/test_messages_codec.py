"""The codec: round trips of every type, exact sizes, bounds, and refusals of what is not a message."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgefl.errors import ProtocolError
from edgefl.messages import Codec, Message, payload_bytes
from edgefl.messages.v1 import envelope_pb2
from edgefl.messages.wire import DTYPES, Header, TensorRef, TensorSpec
from edgefl.parameters import BufferSpec, Layout, Vector

LAYOUT = Layout.of_shapes(
    [("w", (3, 4)), ("b", (3,))],
    [BufferSpec("mean", (3,), torch.float32), BufferSpec("count", (), torch.int64)],
)
OTHER = Layout.of_shapes([("w", (2,))], dtype=torch.float64)


@dataclass(frozen=True)
class Mixed(Message):
    count: int
    share: float
    flag: bool
    text: str
    raw: bytes
    tensor: Tensor
    vector: Vector
    maybe: Vector | None
    pairs: tuple[tuple[int, float], ...]
    parts: tuple[Tensor, ...]
    either: int | str | tuple[bool, bytes] | None


@dataclass(frozen=True)
class Plain(Message):
    round: int
    parameters: Vector


@dataclass(frozen=True)
class Bounded(Message):
    values: Tensor
    names: tuple[int, ...] = ()
    max_size = {"values": 8, "names": 3}


@dataclass(frozen=True)
class Empty(Message):
    pass


@dataclass(frozen=True)
class Strict(Message):
    share: float

    def __post_init__(self) -> None:
        if self.share < 0:
            raise ValueError("share must not be negative")


CODEC = Codec([Mixed, Plain, Bounded, Empty, Strict], [LAYOUT, OTHER], max_values=1000)


def vector(layout: Layout = LAYOUT, start: float = 0.0) -> Vector:
    buffers = tuple(torch.ones(b.shape, dtype=b.dtype) for b in layout.buffers)
    return Vector(layout, torch.arange(layout.size, dtype=layout.dtype) + start, buffers)


def travel(message: Message, codec: Codec = CODEC) -> Any:
    encoded = codec.encode(message.stamped(3, 1), [7], 11)
    assert codec.sizes(message) == (encoded.payload_bytes, encoded.nbytes)
    assert encoded.payload_bytes == payload_bytes(message)
    return codec.decode(encoded.header, bytearray(b"".join(encoded.payload)))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if isinstance(a, Vector):
        return a.layout == b.layout and all(map(same, (a.values, *a.buffers), (b.values, *b.buffers)))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def all_same(a: Message, b: Message) -> bool:
    return type(a) is type(b) and all(
        same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)
    )


integers = st.integers(-(2**63), 2**63 - 1)
shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.sampled_from(sorted(DTYPES, key=str)),
    shapes,
)
vectors = st.builds(vector, st.sampled_from([LAYOUT, OTHER]), st.floats(-9, 9, width=32))
mixed = st.builds(
    Mixed,
    count=integers,
    share=st.floats(),
    flag=st.booleans(),
    text=st.text(max_size=200),
    raw=st.binary(max_size=300),
    tensor=tensors,
    vector=vectors,
    maybe=st.none() | vectors,
    pairs=st.lists(st.tuples(integers, st.floats()), max_size=20).map(tuple),
    parts=st.lists(tensors, max_size=4).map(tuple),
    either=integers | st.text(max_size=5) | st.none() | st.tuples(st.booleans(), st.binary(max_size=5)),
)


@settings(max_examples=200, deadline=None)
@given(mixed)
def test_any_message_comes_back_and_its_size_is_known_beforehand(message: Mixed) -> None:
    back = travel(message)
    assert all_same(message, back)
    assert (back.sender, back.life) == (3, 1)


def test_size_does_not_depend_on_the_values_of_scalars() -> None:
    sizes = {len(CODEC.encode(Plain(n, vector()), [1], n).header) for n in (0, 1, 127, 128, 2**40)}
    assert len(sizes) == 1


def test_tensors_are_not_copied_on_the_way_out_nor_in() -> None:
    v = vector(OTHER)
    encoded = CODEC.encode(Plain(1, v), [1], 0)
    assert np.frombuffer(encoded.payload[0], np.uint8).ctypes.data == v.values.data_ptr()
    buffer = bytearray(encoded.payload[0])
    back = CODEC.decode(encoded.header, buffer)
    assert isinstance(back, Plain)
    buffer[:8] = np.float64(5.0).tobytes()
    assert back.parameters.values[0] == 5.0


def test_a_strided_tensor_travels_as_its_values() -> None:
    values = torch.arange(12.0).reshape(3, 4).T[:2]
    assert torch.equal(travel(Bounded(values[:, :2])).values, values[:, :2])


def test_numbers_take_the_type_of_their_field() -> None:
    back = travel(dataclasses.replace(message(), count=np.int64(4), share=2, flag=np.bool_(True)))
    assert (type(back.count), type(back.share), type(back.flag)) == (int, float, bool)


def test_a_message_without_fields_travels() -> None:
    assert all_same(travel(Empty()), Empty())


def message() -> Mixed:
    return Mixed(
        1, 0.5, True, "a", b"raw", torch.zeros(2), vector(), None, ((1, 2.0),), (torch.ones(1),), None
    )


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("count", 1.5, "Mixed.count: int is needed, found float 1.5"),
        ("count", 2**63, "Mixed.count: an integer of 64 bits"),
        ("tensor", np.zeros(3), "Mixed.tensor: ndarray cannot travel"),
        ("tensor", torch.zeros(2, dtype=torch.complex64), "Mixed.tensor: a torch.strided tensor of"),
        ("tensor", torch.eye(2).to_sparse(), "Mixed.tensor: a torch.sparse_coo tensor"),
        ("pairs", [(1, 2.0)], "Mixed.pairs: list cannot travel"),
        ("pairs", ((1,),), "Mixed.pairs"),
        ("vector", vector(Layout.of_shapes([("x", (1,))])), "Mixed.vector: a Vector of a layout"),
        ("text", None, "Mixed.text: str is needed"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_named_by_class_and_field(field: str, value: Any, text: str) -> None:
    wrong = dataclasses.replace(message(), **{field: value})
    CODEC.sizes(message())
    with pytest.raises(TypeError, match=text):
        CODEC.encode(wrong, [1], 0)
    with pytest.raises(TypeError, match=text):
        CODEC.sizes(wrong)


def test_too_large_is_refused_on_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"Bounded\.values: 9 values, at most 8"):
        CODEC.sizes(Bounded(torch.zeros(9)))
    with pytest.raises(ValueError, match=r"Bounded\.names: 4 items, at most 3"):
        CODEC.sizes(Bounded(torch.zeros(1), (1, 2, 3, 4)))
    with pytest.raises(ValueError, match=r"Mixed\.tensor: 1001 values, at most 1000"):
        CODEC.sizes(dataclasses.replace(message(), tensor=torch.zeros(1001)))
    with pytest.raises(ValueError, match="Mixed: its header takes"):
        CODEC.encode(dataclasses.replace(message(), text="x" * 70_000), [1], 0)


@dataclass(frozen=True)
class Listed(Message):
    names: list[int]


def test_a_class_that_cannot_travel_is_refused_when_the_codec_is_made() -> None:
    with pytest.raises(TypeError, match=r"Listed.names: list\[int\] cannot travel"):
        Codec([Listed])
    with pytest.raises(TypeError, match="two message classes are named Plain"):
        Codec([Plain, type("Plain", (Message,), {})])


def header(change: Callable[[Any], object], message: Message | None = None) -> bytes:
    """The header of a message after a change to its protobuf form."""
    proto = envelope_pb2.Header.FromString(CODEC.encode(message or Plain(1, vector()), [1], 0).header)
    change(proto)
    return bytes(proto.SerializeToString())


def shape(*sizes: int) -> Callable[[Any], object]:
    def change(proto: Any) -> None:
        del proto.tensors[0].shape[:]
        proto.tensors[0].shape.extend(sizes)

    return change


BOUNDED = Bounded(torch.zeros(4))
REFUSED: list[tuple[Callable[[Any], object], Message | None, str, str]] = [
    (lambda h: setattr(h, "protocol_version", 2), None, "FAILED_PRECONDITION", "protocol version 2"),
    (lambda h: setattr(h, "kind", "Plane"), None, "UNIMPLEMENTED", "did you mean 'Plain'"),
    (lambda h: setattr(h.fields[0], "name", "rond"), None, "INVALID_ARGUMENT", "has the fields"),
    (lambda h: h.fields.pop(), None, "INVALID_ARGUMENT", "has the fields"),
    (lambda h: h.fields.add(name="round"), None, "INVALID_ARGUMENT", "without a value"),
    (lambda h: setattr(h.fields[0].value, "real", 1.0), None, "INVALID_ARGUMENT", "int is needed"),
    (lambda h: setattr(h.fields[0].value, "truth", True), None, "INVALID_ARGUMENT", "int is needed"),
    (lambda h: setattr(h.fields[1].value.vector, "layout_digest", 5), None, "FAILED_PRECONDITION", "layout"),
    (lambda h: setattr(h.fields[1].value.vector, "num_buffers", 1), None, "INVALID_ARGUMENT", "shapes"),
    (lambda h: setattr(h.fields[1].value.vector, "tensor", 9), None, "INVALID_ARGUMENT", "out of order"),
    (lambda h: h.tensors.add(dtype=1, codec=1), None, "INVALID_ARGUMENT", "are used"),
    (lambda h: setattr(h.tensors[0], "dtype", 99), None, "INVALID_ARGUMENT", "dtype 99"),
    (lambda h: setattr(h.tensors[0], "codec", 7), None, "INVALID_ARGUMENT", "codec 7"),
    (shape(16), None, "INVALID_ARGUMENT", "layout's shapes"),
    (shape(-1, -4), BOUNDED, "INVALID_ARGUMENT", "negative shape"),
    (shape(2**62, 2**62), BOUNDED, "RESOURCE_EXHAUSTED", "at most 8"),
    (shape(3), BOUNDED, "INVALID_ARGUMENT", "announced"),
    (lambda h: setattr(h, "payload_bytes", 2**63), BOUNDED, "INVALID_ARGUMENT", "announced"),
]


@pytest.mark.parametrize(("change", "message", "code", "text"), REFUSED)
def test_a_wrong_header_is_refused_with_its_status(
    change: Callable[[Any], object], message: Message | None, code: str, text: str
) -> None:
    with pytest.raises(ProtocolError, match=text) as caught:
        CODEC.check_header(header(change, message))
    assert caught.value.code == code


def test_bounds_of_the_receiver() -> None:
    encoded = CODEC.encode(BOUNDED, [1], 0)
    assert CODEC.check_header(encoded.header, memory_bytes=16).payload_bytes == 16
    with pytest.raises(ProtocolError, match="at most 15") as caught:
        CODEC.check_header(encoded.header, memory_bytes=15)
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    with pytest.raises(ProtocolError, match="header of 65537 bytes"):
        CODEC.check_header(bytes(65537))


def test_a_wrong_payload_is_refused() -> None:
    encoded = CODEC.encode(BOUNDED, [1], 0)
    with pytest.raises(ProtocolError, match="checksum") as caught:
        CODEC.decode(encoded.header, b"\1" + bytes(15))
    assert caught.value.code == "DATA_LOSS"
    with pytest.raises(ProtocolError, match="payload of 12 bytes"):
        CODEC.decode(encoded.header, bytes(12))


def test_values_that_the_class_refuses_are_a_protocol_error() -> None:
    bad = header(lambda h: setattr(h.fields[0].value, "real", -1.0), Strict(1.0))
    with pytest.raises(ProtocolError, match="Strict refuses its values: share must not be negative"):
        CODEC.decode(bad, b"")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        CODEC.check_header(data)


def test_booleans_from_outside_hold_zero_or_one() -> None:
    message = Bounded(torch.tensor([True, False]))
    encoded = CODEC.encode(message, [1], 0)
    hostile = bytes([7, 0])
    change = header(lambda h: setattr(h, "checksum", zlib.crc32(hostile)), message)
    back = CODEC.decode(change, hostile)
    assert isinstance(back, Bounded)
    assert back.values.view(torch.uint8).tolist() == [1, 0]
    assert len(change) == len(encoded.header)


def test_a_header_of_this_version_stays_readable() -> None:
    """Bytes stored when version 1 was made; they must parse for as long as it is spoken."""
    stored = bytes.fromhex(
        "0d010000001207426f756e6465641d0300000025010000002a0407000000310900000000000000"
        "3a0f0a0676616c756573120545000000003a0b0a056e616d657312023a00420e080110011a0802"
        "000000000000004908000000000000005569df2265"
    )
    known = Header.from_bytes(stored)
    assert known.kind == "Bounded" and (known.sender, known.life, known.sequence) == (3, 1, 9)
    assert known.receivers == (7,) and known.payload_bytes == 8
    assert known.fields == (("values", TensorRef(0)), ("names", ()))
    assert known.tensors == (TensorSpec(torch.float32, (2,)),)
    assert known.to_bytes() == stored
