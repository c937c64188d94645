"""Messages that leave one after the other, beside what a program does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from edgefl.nodes import Message, Node, Task


class OutQueue:
    """A node's queue of messages to others: at most one of them is on the wire, oldest first."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._waiting: deque[tuple[int, Message]] = deque()
        self._sender: Task[None] | None = None

    def __len__(self) -> int:
        """How many have not begun to leave."""
        return len(self._waiting)

    def extend(self, messages: Iterable[tuple[int, Message]]) -> None:
        """Queue (receiver, message) pairs behind those that wait."""
        self._waiting.extend(messages)
        if self._waiting and self._sender is None:
            self._sender = self._node.start(self._drain())

    def replace(self, messages: Iterable[tuple[int, Message]]) -> None:
        """Queue these in place of all that have not begun to leave; the one on the wire is finished."""
        self._waiting.clear()
        self.extend(messages)

    async def _drain(self) -> None:
        try:
            while self._waiting:
                to, message = self._waiting.popleft()
                await self._node.send(to, message)
        finally:
            self._sender = None
