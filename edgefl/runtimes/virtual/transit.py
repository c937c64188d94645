"""Messages under way, the lanes that they take, and what links ask of the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from mypy_extensions import mypyc_attr

from edgefl.keyed import generator
from edgefl.messages.base import Message

if TYPE_CHECKING:
    from edgefl.runtimes.virtual.hubs import Hub
    from edgefl.runtimes.virtual.sharing import End


_BLOCK = 64
"""Random numbers drawn at once: a generator of its own for each costs ten times as much."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Draws:
    """A node's uniform numbers for one purpose, an endless stream keyed by (seed, purpose, node)."""

    __slots__ = ("_block", "_key", "left")

    def __init__(self, seed: int, purpose: str, node: int) -> None:
        self._key = seed, purpose, node
        self._block = 0
        self.left: list[float] = []
        """What has been drawn and not been used, the next one last."""

    def next(self) -> float:
        return (self.left or self.more()).pop()

    def more(self) -> list[float]:
        """Draw a block, once `left` is empty."""
        rng = generator(*self._key, self._block)
        self._block += 1
        self.left = rng.random(_BLOCK)[::-1].tolist()
        return self.left


@mypyc_attr(allow_interpreted_subclasses=True)
class Lane:
    """The way of one kind of message from one node to another, and what all of them meet on it.

    ends: latency_s, jitter and loss of the sender's access and of the receiver's. draws: the sender's, for
    jitter; None where there is none. row: the lane's traffic. state: the receiver's, as the runtime knows it.
    """

    __slots__ = (
        "busy", "cap", "copying_rate", "crosses", "draws", "ends", "kind", "last_arrival_s", "latency_s",
        "loss", "name", "receiver", "row", "sender", "state", "waiting",
    )  # fmt: skip

    def __init__(
        self, sender: int, receiver: int, state: Any, kind: type[Message], cap: float, row: list[int],
        ends: tuple[tuple[float, float, float], tuple[float, float, float]], copying_rate: float,
        draws: Draws | None,
    ) -> None:  # fmt: skip
        self.sender, self.receiver, self.state = sender, receiver, state
        self.kind, self.name = kind, kind.__name__
        self.cap, self.row, self.ends, self.copying_rate, self.draws = cap, row, ends, copying_rate, draws
        (latency_s, _, loss), (far_latency_s, _, far_loss) = ends
        self.latency_s = latency_s + far_latency_s
        self.loss = 1 - (1 - loss) * (1 - far_loss)
        self.crosses: tuple[End, ...] = ()
        """The capacities on the way, where links share them; known from the first message on."""
        self.last_arrival_s = 0.0
        self.busy = False
        """Whether one is on its way, so that others wait for it to have left."""
        self.waiting: list[Flow] = []

    def latency(self) -> float:
        """Seconds from one end to the other for the next message."""
        draws = self.draws
        if draws is None:
            return self.latency_s
        total = 0.0
        for latency_s, jitter, _ in self.ends:
            if jitter:
                latency_s *= 1 + jitter * (2 * (draws.left or draws.more()).pop() - 1)
            total += latency_s
        return total


@mypyc_attr(allow_interpreted_subclasses=True)
class Flow:
    """One message on its way to one receiver. size_bytes: as sent, retransmissions included.

    most: what it could take if it had its links to itself. number, goal: its place in a hub.
    """

    __slots__ = (
        "encoded_bytes", "ends", "goal", "hub", "lane", "most", "number", "rate", "remaining", "reserved",
        "size_bytes", "start_s", "stopped", "token", "transfer", "updated_s",
    )  # fmt: skip

    def __init__(
        self, transfer: Any, lane: Lane, encoded_bytes: int, size_bytes: float, reserved: float | None
    ) -> None:
        self.transfer, self.lane = transfer, lane
        self.encoded_bytes = encoded_bytes
        self.size_bytes = self.remaining = size_bytes
        self.reserved = reserved
        self.rate = 0.0
        self.start_s = self.updated_s = 0.0
        self.token = 0
        self.stopped = False
        self.ends: tuple[End, ...] = ()
        self.most = lane.cap
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
