"""A node's inbox: messages that have arrived and that nobody has asked for yet."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Iterator, Mapping

from mypy_extensions import mypyc_attr

from edgefl.messages.base import Back, Gone, Message
from edgefl.nodes.operations import Receive

_ABOUT_PEERS = Gone, Back  # a tuple: a union of types would be made anew for each message
_fields_of = functools.cache(lambda names: operator.attrgetter(*names))
"""What gets these fields of a message, at once."""


def matches(pattern: Receive, message: Message) -> bool:
    """Whether a receive takes this message, which is of one of its kinds. Gone and Back have no fields to
    compare."""
    if pattern.senders is not None and message.sender not in pattern.senders:
        return False
    if not pattern.fields or isinstance(message, _ABOUT_PEERS):
        return True
    for name, value in pattern.fields.items():  # noqa: SIM110 (all() over a generator is twice as slow)
        if getattr(message, name, None) != value:
            return False
    return True


def is_stale(pattern: Receive, message: Message) -> bool:
    """Whether a receive of a later round makes this message, which is of one of its kinds, void."""
    counter = message.stale_by
    if counter is None or counter not in pattern.fields:
        return False
    return bool(getattr(message, counter) < pattern.fields[counter])


@mypyc_attr(allow_interpreted_subclasses=True)
class Inbox:
    """Messages by kind, oldest first, under the rules that their classes state.

    stale: messages dropped because a later round was asked for, by kind name.
    """

    def __init__(self) -> None:
        self._by_kind: dict[type[Message], deque[tuple[int, Message]]] = {}
        self._arrivals = self._held = 0
        self._seen: dict[type[Message], set[object]] = {}
        self.stale: dict[str, int] = {}

    def repeated(self, message: Message) -> bool:
        """Whether the like of it, by `once_by`, has been here before; notes that it is here now."""
        if message.once_by is None:
            return False
        seen = self._seen.setdefault(type(message), set())
        key = _fields_of(message.once_by)(message)
        if key in seen:
            return True
        seen.add(key)
        return False

    def put(self, message: Message) -> None:
        """Keep a message until somebody asks for it."""
        queue = self._by_kind.setdefault(type(message), deque())
        if message.newest_by is not None and queue:
            key = [getattr(message, name) for name in message.newest_by]
            for at, (_, old) in enumerate(queue):
                if [getattr(old, name) for name in message.newest_by] == key:
                    del queue[at]
                    self._held -= 1
                    break
        self._arrivals += 1
        self._held += 1
        queue.append((self._arrivals, message))

    def get(self, pattern: Receive) -> Message | None:
        """Take out the oldest match; stale messages that it meets are dropped and counted."""
        if not self._held:  # most often so: nothing else is looked at
            return None
        best: tuple[int, Message] | None = None
        for kind, queue in self._by_kind.items():
            if not queue or not issubclass(kind, pattern.kinds):
                continue
            self._drop_stale(pattern, kind, queue)
            for entry in queue:
                if matches(pattern, entry[1]):
                    if best is None or entry[0] < best[0]:
                        best = entry
                    break
        if best is None:
            return None
        self._held -= 1
        queue = self._by_kind[type(best[1])]
        if queue[0] is best:
            queue.popleft()
        else:
            queue.remove(best)
        return best[1]

    def take(self, pattern: Receive) -> list[Message]:
        """Take out all matches, oldest first."""
        found: list[tuple[int, Message]] = []
        for kind, queue in self._by_kind.items():
            if queue and issubclass(kind, pattern.kinds):
                self._drop_stale(pattern, kind, queue)
                hits = [entry for entry in queue if matches(pattern, entry[1])]
                if hits:
                    found += hits
                    self._held -= len(hits)
                    chosen = {arrival for arrival, _ in hits}
                    self._by_kind[kind] = deque(e for e in queue if e[0] not in chosen)
        return [message for _, message in sorted(found, key=lambda entry: entry[0])]

    def _drop_stale(self, pattern: Receive, kind: type[Message], queue: deque[tuple[int, Message]]) -> None:
        if kind.stale_by is None or kind.stale_by not in pattern.fields:
            return
        kept = [entry for entry in queue if not is_stale(pattern, entry[1])]
        if len(kept) < len(queue):
            self.count_stale(kind, len(queue) - len(kept))
            self._held -= len(queue) - len(kept)
            queue.clear()
            queue.extend(kept)

    def count_stale(self, kind: type[Message], messages: int) -> None:
        """So many of a kind came for an earlier round."""
        self.stale[kind.__name__] = self.stale.get(kind.__name__, 0) + messages

    def forget(self, kind: type[Message], sender: int) -> None:
        """Drop all messages of a kind from a sender (an older word on whether it lives)."""
        queue = self._by_kind.get(kind)
        if queue:
            kept = [entry for entry in queue if entry[1].sender != sender]
            self._held -= len(queue) - len(kept)
            self._by_kind[kind] = deque(kept)

    def waiting(self) -> Iterator[Message]:
        """All that nobody has asked for yet."""
        for queue in self._by_kind.values():
            yield from (message for _, message in queue)

    def count(self) -> Mapping[str, int]:
        """How many wait here, by kind name."""
        return {kind.__name__: len(queue) for kind, queue in self._by_kind.items() if queue}
