"""Counting what is sent."""

from __future__ import annotations

from collections import defaultdict


class Traffic:
    """What was sent so far.

    table: messages, payload bytes and encoded bytes by (sender, receiver, kind). sent_bytes, received_bytes:
    encoded bytes by node.
    """

    def __init__(self) -> None:
        self.table: dict[tuple[int, int, str], list[int]] = {}
        self.payload_bytes = self.encoded_bytes = self.messages = 0
        self.sent_bytes: defaultdict[int, int] = defaultdict(int)
        self.received_bytes: defaultdict[int, int] = defaultdict(int)

    def add(
        self, sender: int, receiver: int, kind: str, payload: int, encoded: int, messages: int = 1
    ) -> None:
        """Count messages of one kind from one node to another."""
        row = self.table.get((sender, receiver, kind))
        if row is None:
            row = self.table[sender, receiver, kind] = [0, 0, 0]
        row[0] += messages
        row[1] += payload
        row[2] += encoded
        self.messages += messages
        self.payload_bytes += payload
        self.encoded_bytes += encoded
        self.sent_bytes[sender] += encoded
        self.received_bytes[receiver] += encoded
