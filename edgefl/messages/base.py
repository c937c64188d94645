"""The base of all messages. A method's messages are frozen dataclasses in the method's own file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from edgefl.parameters import Vector


@dataclass(frozen=True)
class Message:
    """What one node tells another.

    Fields: Vector, Tensor, int, float, bool, str, bytes, None, and tuples of them.
    The class attributes say how a kind is treated; a subclass sets them without an annotation.
    """

    lossy: ClassVar[bool] = False
    """A datagram: it may be lost, doubled and reordered."""
    newest_by: ClassVar[tuple[str, ...] | None] = None
    """An inbox keeps only the newest message per these fields, e.g. ("sender", "fragment")."""
    stale_by: ClassVar[str | None] = None
    """A counter field: receive(round=t) drops and counts the messages of earlier rounds."""
    once_by: ClassVar[tuple[str, ...] | None] = None
    """Repeats, equal in these fields, are dropped: a restarted sender says things again."""
    max_size: ClassVar[dict[str, int]] = {}
    """Most values that a tensor field (or items that a tuple or text field) may hold; a Vector needs none."""

    sender: ClassVar[int] = -1
    """The node that sent it; set on the way out."""
    life: ClassVar[int] = 0
    """The sender's life when it was sent."""

    def stamped(self, sender: int, life: int) -> Self:
        """This message as sent by a node: itself when nobody sent it before, else a copy (forwarding)."""
        if self.sender != Message.sender:
            if self.sender == sender and self.life == life:
                return self
            return dataclasses.replace(self).stamped(sender, life)
        object.__setattr__(self, "sender", sender)
        object.__setattr__(self, "life", life)
        return self


@dataclass(frozen=True)
class Gone(Message):
    """A node is gone, as far as this one can tell.

    Level-triggered: a receive that lists Gone and names a dead sender gets it at once, each time.
    """


@dataclass(frozen=True)
class Back(Message):
    """A node has returned; `life` is its new life."""


_FIELD_NAMES: dict[type[Message], tuple[str, ...]] = {}


def field_names(kind: type[Message]) -> tuple[str, ...]:
    """The fields of a message class in order."""
    names = _FIELD_NAMES.get(kind)
    if names is None:
        names = _FIELD_NAMES[kind] = tuple(f.name for f in dataclasses.fields(kind))
    return names


def payload_bytes(message: Message) -> int:
    """Bytes of the tensors that a message carries: what papers count (headers and scalars apart)."""
    return sum(_tensor_bytes(getattr(message, name)) for name in field_names(type(message)))


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Vector | torch.Tensor):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(map(_tensor_bytes, value))
    return len(value) if isinstance(value, bytes) else 0
