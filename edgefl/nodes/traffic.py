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
        self.count(self.row(sender, receiver, kind), sender, receiver, payload, encoded, messages)

    def row(self, sender: int, receiver: int, kind: str) -> list[int]:
        """The row of one kind from one node to another, to be counted in by `count`."""
        return self.table.setdefault((sender, receiver, kind), [0, 0, 0])

    def count(
        self, row: list[int], sender: int, receiver: int, payload: int, encoded: int, messages: int = 1
    ) -> None:
        """Count messages in their row, for whoever holds it."""
        row[0] += messages
        row[1] += payload
        row[2] += encoded
        self.messages += messages
        self.payload_bytes += payload
        self.encoded_bytes += encoded
        self.sent_bytes[sender] += encoded
        self.received_bytes[receiver] += encoded
