"""What has been sent, counted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """One flow. A cancelled message adds the bytes that had left, and no message; a repeat adds nothing."""

    messages: int = 0
    payload_bytes: int = 0
    encoded_bytes: int = 0


@dataclass
class Stats:
    """flows: by (sender, receiver, kind). frame bytes: all that streams carried, repeats and receipts too."""

    flows: dict[tuple[int, int, str], Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    frame_bytes_sent: int = 0
    frame_bytes_received: int = 0

    def count(
        self, flow: tuple[int, int, str], payload_bytes: int, encoded_bytes: int, *, messages: int = 1
    ) -> None:
        """Add a message of a flow (or, with messages 0, the part of one that left)."""
        traffic = self.flows[flow]
        traffic.messages += messages
        traffic.payload_bytes += payload_bytes
        traffic.encoded_bytes += encoded_bytes
