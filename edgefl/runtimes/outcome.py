"""What a run comes to, the same in every runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgefl.nodes.traffic import Traffic
from edgefl.parameters import Vector

FRAME_BYTES = 1 << 20
INTERRUPTED = "interrupted"
"""The reason of a run that somebody ended from outside; it may go on later."""
_FRAME_OVERHEAD = 9 + 5 + 28  # HTTP/2 frame header, gRPC message prefix, our frame's header fields
_SEGMENT_BYTES, _SEGMENT_OVERHEAD = 1448, 66  # TCP payload of an Ethernet frame; Ethernet, IP and TCP headers


@dataclass
class Outcome:
    """status: "finished" when the programs that end the run returned, else "stopped" for `reason`.

    time_s: on the run's clock. results: what main programs returned, by node. busy_s: seconds that each
    node's processor worked. stale, dropped: messages that were not used, by kind or reason.
    """

    status: Literal["finished", "stopped"]
    reason: str
    time_s: float
    results: Mapping[int, Any]
    traffic: Traffic
    busy_s: Mapping[int, float]
    stale: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    num_events: int = 0
    """Events of the virtual clock; 0 on the wall clock."""
    last_models: Mapping[int, tuple[float, int, Vector]] = field(default_factory=dict)
    """What nodes of other processes published last: time, step, model."""
    frame_bytes: int | None = None
    """Measured bytes of all frames that were sent; None in virtual time."""

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire as modelled, headers of all layers included."""
        return sum(on_wire_bytes(row[2], row[0]) for row in self.traffic.table.values())


def on_wire_bytes(encoded_bytes: int, messages: int = 1) -> int:
    """Modelled bytes on the wire of `messages` messages of `encoded_bytes` in all.

    Frames of at most 1 MiB, each with its HTTP/2, gRPC and frame headers, in TCP segments of 1,448 bytes
    with 66 bytes of Ethernet, IP and TCP headers. Acknowledgements are left out.
    """
    frames = max(messages, math.ceil(encoded_bytes / FRAME_BYTES))
    framed = encoded_bytes + frames * _FRAME_OVERHEAD
    return framed + max(messages, math.ceil(framed / _SEGMENT_BYTES)) * _SEGMENT_OVERHEAD
