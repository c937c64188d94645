"""Messages that nodes here have been given, and that their senders keep until they are covered."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from edgefl.messages import Message


class Handed(NamedTuple):
    """A message that has been handed over, and that its sender keeps until it is covered."""

    process: int
    sequence: int
    instance: bytes
    """Of the sending process: another one numbers its messages anew."""


class HandedOver:
    """Which messages those are. It keeps none of them alive."""

    def __init__(self) -> None:
        self._messages: dict[Handed, weakref.ref[Message]] = {}

    def add(self, one: Handed, message: Message) -> None:
        """A message has been handed over."""
        self._messages[one] = weakref.ref(message)

    def take(self, waiting: Iterable[Message]) -> list[Handed]:
        """What nodes here have had since the last call and is not among those still `waiting` for them."""
        unread = {id(message) for message in waiting}
        had = [one for one, ref in self._messages.items() if id(ref()) not in unread]
        for one in had:
            del self._messages[one]
        return had
