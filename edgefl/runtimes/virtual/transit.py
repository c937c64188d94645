"""A message under way, and what links ask of the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from edgefl.messages.base import Message

if TYPE_CHECKING:
    from edgefl.runtimes.virtual.hubs import Hub
    from edgefl.runtimes.virtual.sharing import End


class Flow:
    """One message on its way to one receiver. size_bytes: as sent, retransmissions included.

    most: what it could take if it had its links to itself. number, goal: its place in a hub.
    """

    __slots__ = (
        "cap", "encoded_bytes", "ends", "goal", "hub", "kind", "most", "number", "rate", "receiver",
        "remaining", "reserved", "sender", "size_bytes", "start_s", "stopped", "token", "transfer",
        "updated_s",
    )  # fmt: skip

    def __init__(
        self, transfer: Any, sender: int, receiver: int, kind: type[Message], encoded_bytes: int,
        size_bytes: float, cap: float, reserved: float | None,
    ) -> None:  # fmt: skip
        self.transfer, self.sender, self.receiver, self.kind = transfer, sender, receiver, kind
        self.encoded_bytes = encoded_bytes
        self.size_bytes = self.remaining = size_bytes
        self.cap, self.reserved = cap, reserved
        self.rate = 0.0
        self.start_s = self.updated_s = 0.0
        self.token = 0
        self.stopped = False
        self.ends: tuple[End, ...] = ()
        self.most = cap
        self.hub: Hub | None = None
        self.number, self.goal = -1, 0.0

    @property
    def current_rate(self) -> float:
        """Bytes per second now; 0 while it has not begun."""
        return self.rate if self.hub is None else self.hub.rate(self)

    def sent_bytes(self, now: float) -> float:
        """How much has left by now, of a flow that goes at its own rate."""
        if self.updated_s > now or self.rate == 0:
            return self.size_bytes - self.remaining
        return min(self.size_bytes, self.size_bytes - self.remaining + self.rate * (now - self.updated_s))


class Clock(Protocol):
    """What links ask of the kernel."""

    def clock(self) -> float: ...
    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None: ...
    def call_last(self, call: Callable[..., None]) -> None: ...
    def call_aside(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """As call_later, for what moves no program by itself: a run does not go on for its sake."""
        ...


class Links(Protocol):
    """A link model. on_left(flow, hold_s): the last byte has left; it arrives hold_s + latency later."""

    keeps_order: bool
    """Whether flows of one sender leave in the order in which they started."""

    def begin(self) -> None:
        """A run begins."""
        ...

    def start(self, flow: Flow) -> None: ...
    def stop(self, flow: Flow) -> None: ...
