"""Saves that outlive the process, and the receipts that wait for them.

A save is on the disk before the messages that it has used are covered, and not before all that was sent
ahead of it has arrived: so whatever a next life finds missing comes again, or is sent again.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from edgefl.messages import Message
from edgefl.runtimes.grpc.handed import Handed
from edgefl.runtimes.grpc.state import StateFolder
from edgefl.runtimes.grpc.transport import Transport

log = logging.getLogger("edgefl.grpc")
_LEAST_PAUSE_S, _PAUSE_PER_WRITE = 0.5, 10.0
"""Writing takes at most a tenth of the time, and the disk has half a second between files."""
RECORDS_EVERY_S = 10.0
"""A program that has nothing to save has its records written this often."""

Content = dict[str, Any]


class Host(Protocol):
    """What a keeper asks of its runtime."""

    def clock(self) -> float: ...
    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None: ...
    def call_from_thread(self, call: Callable[..., None], *args: Any) -> None: ...


@dataclass(slots=True)
class _Save:
    """number: of the first message that was sent after it; content: None where nothing changed. then: to be
    called once it is on the disk."""

    number: int
    handed: list[Handed]
    content: Content | None
    then: Callable[[], None] | None


class Keeper:
    """Writes the saves of one node into its folder, the newest that may be, and covers what they used.

    most_bytes: payload that the other processes keep for this one at most; beyond it the node cannot come
    back as if nothing had happened, only anew.
    """

    def __init__(self, folder: StateFolder, transport: Transport, host: Host, most_bytes: int) -> None:
        self.folder, self._transport, self._host = folder, transport, host
        self._most_bytes = most_bytes
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="edgefl-state")
        self._count = 0
        self._under_way: dict[int, None] = {}
        self._saves: deque[_Save] = deque()
        self._content: Content | None = None
        self._handed: list[Handed] = []
        self._then: list[Callable[[], None]] = []
        self._busy = False
        self._next_s = 0.0
        self._given_up = False
        self._refused = False

    @property
    def wants_records(self) -> bool:
        """Whether the records have not been written for a while."""
        return self._host.clock() >= self._next_s + RECORDS_EVERY_S

    def sent(self) -> int:
        """A message is on its way. Returns its number."""
        self._count += 1
        self._under_way[self._count] = None
        return self._count

    def settled(self, number: int) -> None:
        """A message has arrived, was withdrawn, or will never arrive."""
        if self._under_way.pop(number, 0) is None:
            self._advance()

    def saved(
        self,
        content: Content | None,
        waiting: Iterable[Message],
        then: Callable[[], None] | None = None,
    ) -> None:
        """The program can go on from here. content: to be written, None where nothing has changed.

        waiting: messages that have come and that nobody has asked for. then: called when content is on the
        disk; the disk has no rest before it.
        """
        handed = self._transport.handed_over(waiting)
        if handed or content is not None:
            self._saves.append(_Save(self._count + 1, handed, content, then))
            self._advance()

    def arrived(self) -> None:
        """A message has come: see that what the others keep stays within bounds."""
        if not self._given_up and self._transport.kept_bytes > self._most_bytes:
            log.warning(
                "over %d MB have come since the last save: after a crash this node would begin anew",
                self._most_bytes >> 20,
            )
            self._given_up = True
            self._pool.submit(self.folder.give_up)
        if self._given_up:
            self._transport.cover(self._transport.handed_over(()))

    def close(self, *, over: bool) -> None:
        """Finish writing. over: nobody will come back to this."""
        self._pool.shutdown(wait=True)
        if over:
            self.folder.clear()
        elif self._content is not None and not self._refused:
            self._store(self._content)

    def _store(self, content: Content) -> None:
        self.folder.write(content | {"report": json.dumps(content["report"])})

    def _advance(self) -> None:
        """Take up the saves before which all has arrived."""
        oldest = next(iter(self._under_way), self._count + 1)
        while self._saves and self._saves[0].number <= oldest:
            save = self._saves.popleft()
            self._handed += save.handed
            if save.content is not None:
                self._content = save.content
            if save.then is not None:
                self._then.append(save.then)
        if self._content is None and not self._busy:
            self._cover(self._handed)
            self._handed = []
        elif not self._busy:
            self._busy = True
            rest_s = 0.0 if self._then else self._next_s - self._host.clock()
            self._host.call_later(max(0.0, rest_s), self._begin_write)

    def _begin_write(self) -> None:
        assert self._content is not None
        content, handed, then = self._content, self._handed, self._then
        self._content, self._handed, self._then = None, [], []
        self._pool.submit(self._write, content, handed, then, self._host.clock())

    def _write(
        self, content: Content, handed: list[Handed], then: list[Callable[[], None]], start_s: float
    ) -> None:
        """In the writing thread."""
        error: Exception | None = None
        try:
            self._store(content)
        except Exception as failed:
            error = failed
        self._host.call_from_thread(self._written, handed, then, start_s, error)

    def _written(
        self,
        handed: list[Handed],
        then: list[Callable[[], None]],
        start_s: float,
        error: Exception | None,
    ) -> None:
        if error is not None:
            self._refused = True
            raise error
        now = self._host.clock()
        self._next_s = now + max(_LEAST_PAUSE_S, _PAUSE_PER_WRITE * (now - start_s))
        self._busy = False
        self._cover(handed)
        for call in then:
            call()
        self._advance()

    def _cover(self, handed: list[Handed]) -> None:
        if handed:
            self._transport.cover(handed)
