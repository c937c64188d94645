"""Frames written by hand are ordinary protobuf, both ways."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.errors import ProtocolError
from edgefl.messages.v1 import exchange_pb2
from edgefl.runtimes.grpc import frames
from edgefl.runtimes.grpc.frames import Cancel, Data, Frame, Goodbye, Hello, Note, Receipt, Start

CASES: list[tuple[Frame, dict[str, Any]]] = [
    (Data(7, 2**40, b"x" * 300), {"data": {"sequence": 7, "offset": 2**40, "chunk": b"x" * 300}}),
    (Data(0, 0, b""), {"data": {}}),
    (Data(7, 5, b"x", 2**31), {"data": {"sequence": 7, "offset": 5, "chunk": b"x", "checksum": 2**31}}),
    (
        Start(4, b"head", checksum_last=True),
        {"start": {"sequence": 4, "header": b"head", "checksum_last": True}},
    ),
    (Receipt(1, 9, delivered=True), {"receipt": {"sequence": 1, "received": 9, "delivered": True}}),
    (Receipt(1, 9, came_us=2**31), {"receipt": {"sequence": 1, "received": 9, "came_us": 2**31}}),
    (
        Receipt(1, 0, rewind=True, status=8, reason="zu groß"),
        {"receipt": {"sequence": 1, "rewind": True, "status": 8, "reason": "zu groß"}},
    ),
    (
        Start(3, b"head", b"chunk", resumed=True),
        {"start": {"sequence": 3, "header": b"head", "chunk": b"chunk", "resumed": True}},
    ),
    (
        Start(3, note=Note("report", 2**33, 5)),
        {"start": {"sequence": 3, "note": {"kind": "report", "payload_bytes": 2**33, "checksum": 5}}},
    ),
    (Cancel(12), {"cancel": {"sequence": 12}}),
    (Goodbye(), {"goodbye": {}}),
    (
        Hello(1, "run", "digest", 2, (4, 5), (1, 1), b"id", (8, 2**50), 1),
        {
            "hello": {
                "protocol_version": 1,
                "run_id": "run",
                "experiment_digest": "digest",
                "process": 2,
                "nodes": [4, 5],
                "lives": [1, 1],
                "instance": b"id",
                "open": [8, 2**50],
                "revision": 1,
            }
        },
    ),
]


@pytest.mark.parametrize(("frame", "fields"), CASES)
def test_both_forms_are_the_same_message(frame: Frame, fields: dict[str, Any]) -> None:
    generated = exchange_pb2.Frame(**fields)
    assert exchange_pb2.Frame.FromString(frames.write(frame)) == generated
    assert frames.read(generated.SerializeToString()) == [frame]


def test_frames_that_leave_together_come_together() -> None:
    together: list[Frame] = [Receipt(1, 9, delivered=True), Cancel(2), Start(3, b"head", b"x" * 300)]
    assert frames.read(frames.write(*together)) == together


def test_fields_of_a_later_version_are_passed_over() -> None:
    later = b"\xaa\x06\x03abc" + b"\xb0\x06\x05" + b"\xb9\x06" + bytes(8) + frames.write(Cancel(1))
    assert frames.read(later) == [Cancel(1)]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_whatever_comes_is_a_frame_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert exchange_pb2.Frame.FromString(frames.write(*frames.read(data))).WhichOneof("body")


@pytest.mark.parametrize(
    "data",
    [b"", b"\x0a", b"\x0a\x05abc", b"\x0a\x02\x0b\x00", b"\xff" * 11, b"\x08\x01", b"\x0a\x02\x1a\x05",
     b"\x2a\x03\x2a\x01a", b"\x2a\x04\x12\x02\xff\xff"],
)  # fmt: skip
def test_truncated_and_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a frame"):
        frames.read(data)
