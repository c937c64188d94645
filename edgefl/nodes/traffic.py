"""Counting what is sent."""

from __future__ import annotations

from collections import defaultdict

from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Traffic:
    """What was sent so far.

    table: messages, payload bytes and encoded bytes by (sender, receiver, kind). All else is summed up from
    it when it is asked for: counting a message touches nothing but its row.
    """

    def __init__(self) -> None:
        self.table: dict[tuple[int, int, str], list[int]] = {}
        self._of: dict[int, list[list[int]]] = {}
        """The rows that a node is an end of."""

    def add(
        self, sender: int, receiver: int, kind: str, payload: int, encoded: int, messages: int = 1
    ) -> None:
        """Count messages of one kind from one node to another."""
        row = self.row(sender, receiver, kind)
        row[0] += messages
        row[1] += payload
        row[2] += encoded

    def row(self, sender: int, receiver: int, kind: str) -> list[int]:
        """The row of one kind from one node to another, for whoever holds it to count in."""
        row = self.table.get((sender, receiver, kind))
        if row is None:
            row = self.table[sender, receiver, kind] = [0, 0, 0]
            self._of.setdefault(sender, []).append(row)
            self._of.setdefault(receiver, []).append(row)
        return row

    @property
    def messages(self) -> int:
        return sum(row[0] for row in self.table.values())

    @property
    def payload_bytes(self) -> int:
        return sum(row[1] for row in self.table.values())

    @property
    def encoded_bytes(self) -> int:
        return sum(row[2] for row in self.table.values())

    def node_bytes(self, node: int) -> int:
        """Encoded bytes that a node has sent and was sent."""
        return sum(row[2] for row in self._of.get(node, ()))

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Encoded bytes by sender."""
        sent: defaultdict[int, int] = defaultdict(int)
        for (sender, _, _), row in self.table.items():
            sent[sender] += row[2]
        return dict(sent)

    @property
    def received_bytes(self) -> dict[int, int]:
        """Encoded bytes by receiver."""
        received: defaultdict[int, int] = defaultdict(int)
        for (_, receiver, _), row in self.table.items():
            received[receiver] += row[2]
        return dict(received)
