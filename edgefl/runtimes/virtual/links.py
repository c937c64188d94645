"""Links in virtual time: how flows share uplinks, downlinks and segments, in three models.

fair: max-min over everything a flow crosses; exact, and its work per event grows with the flows.
local-fair: the smaller of the equal shares at a flow's two ends; work per event grows with the degree.
fifo: an uplink sends one message after the other; constant work per event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from edgefl.messages.base import Message
from edgefl.network import NetworkPlan
from edgefl.network.maxmin import max_min

_LEAST_RATE = 1e-9  # bytes per second; a flow that gets nothing still ends some day


class Flow:
    """One message on its way to one receiver. size_bytes: as sent, retransmissions included."""

    __slots__ = (
        "cap", "encoded_bytes", "ends", "kind", "rate", "receiver", "remaining", "reserved", "sender",
        "size_bytes", "start_s", "stopped", "token", "transfer", "updated_s",
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
        self.ends: tuple[_End, ...] = ()

    def sent_bytes(self, now: float) -> float:
        """How much has left by now."""
        if self.updated_s > now or self.rate == 0:
            return self.size_bytes - self.remaining
        return min(self.size_bytes, self.size_bytes - self.remaining + self.rate * (now - self.updated_s))


class Clock(Protocol):
    """What links ask of the kernel."""

    def clock(self) -> float: ...
    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None: ...
    def call_last(self, call: Callable[..., None]) -> None: ...


class Links(Protocol):
    """A link model. on_left(flow, hold_s): the last byte has left; it arrives hold_s + latency later."""

    keeps_order: bool
    """Whether flows of one sender leave in the order in which they started."""

    def start(self, flow: Flow) -> None: ...
    def stop(self, flow: Flow) -> None: ...


def make_links(plan: NetworkPlan, clock: Clock, on_left: Callable[[Flow, float], None]) -> Links:
    """The links of a run under the plan's link model."""
    if plan.link_model == "fifo":
        return FifoLinks(plan, clock, on_left)
    if plan.link_model == "local-fair":
        return LocalFairLinks(plan, clock, on_left)
    return FairLinks(plan, clock, on_left)


class _End:
    """One capacity and the flows that cross it now. capacity, reserved: in bytes per second."""

    __slots__ = ("capacity", "flows", "number", "reserved", "sharing")

    def __init__(self, number: int, capacity: float) -> None:
        self.number, self.capacity = number, capacity
        self.flows: dict[Flow, None] = {}
        self.reserved = 0.0
        self.sharing = 0
        """Flows without a reservation."""

    def enter(self, flow: Flow) -> None:
        self.flows[flow] = None
        if flow.reserved is None:
            self.sharing += 1
        else:
            self.reserved += flow.reserved

    def leave(self, flow: Flow) -> None:
        del self.flows[flow]
        if flow.reserved is None:
            self.sharing -= 1
        else:
            self.reserved = self.reserved - flow.reserved if len(self.flows) > self.sharing else 0.0

    def share(self) -> float:
        """What each flow without a reservation gets here."""
        return max(0.0, self.capacity - self.reserved) / self.sharing


class _SharedLinks:
    """Flows whose rates change as others come and go. Rates are settled once per instant, at its end."""

    keeps_order = False

    def __init__(self, plan: NetworkPlan, clock: Clock, on_left: Callable[[Flow, float], None]) -> None:
        self._clock, self._on_left = clock, on_left
        n = len(plan.access)
        self._ends = [_End(i, a.up_bytes_per_s) for i, a in enumerate(plan.access)]
        self._ends += [_End(n + i, a.down_bytes_per_s) for i, a in enumerate(plan.access)]
        self._segments = {name: _End(2 * n + k, rate) for k, (name, rate) in enumerate(plan.segments.items())}
        self._segment_of = [None if a.segment is None else self._segments[a.segment] for a in plan.access]
        self._dirty: dict[_End, None] = {}

    def _crossed(self, flow: Flow) -> tuple[_End, ...]:
        """The capacities that a flow crosses: uplink, segments, downlink."""
        up, down = self._ends[flow.sender], self._ends[len(self._segment_of) + flow.receiver]
        if not self._segments:
            return up, down
        segments = (self._segment_of[flow.sender], self._segment_of[flow.receiver])
        return tuple(dict.fromkeys(end for end in (up, *segments, down) if end is not None))

    def start(self, flow: Flow) -> None:
        flow.start_s = flow.updated_s = self._clock.clock()
        flow.ends = self._crossed(flow)
        for end in flow.ends:
            end.enter(flow)
        self._touch(flow)

    def stop(self, flow: Flow) -> None:
        """Take a flow off its links, wherever it is."""
        if not flow.stopped:
            self._advance(flow, self._clock.clock())
            self._off(flow)

    def _off(self, flow: Flow) -> None:
        flow.stopped = True
        flow.token += 1
        for end in flow.ends:
            end.leave(flow)
        self._touch(flow)

    def _touch(self, flow: Flow) -> None:
        if not self._dirty:
            self._clock.call_last(self._settle)
        for end in flow.ends:
            self._dirty[end] = None

    def _settle(self) -> None:
        now = self._clock.clock()
        for flow, rate in self._rates():
            if rate != flow.rate:
                self._advance(flow, now)
                flow.rate = rate
                flow.token += 1
                self._clock.call_later(flow.remaining / rate, self._finish, flow, flow.token)
        self._dirty.clear()

    def _rates(self) -> Iterable[tuple[Flow, float]]:
        """Rates of the flows that what is in _dirty may have changed."""
        raise NotImplementedError

    @staticmethod
    def _advance(flow: Flow, now: float) -> None:
        flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.updated_s))
        flow.updated_s = now

    def _finish(self, flow: Flow, token: int) -> None:
        if flow.token == token:
            flow.remaining, flow.updated_s = 0.0, self._clock.clock()
            self._off(flow)
            self._on_left(flow, 0.0)


class LocalFairLinks(_SharedLinks):
    """A flow gets the smallest of the equal shares at the ends that it crosses.

    What a flow leaves of its share at one end is not given to the others there: the price of work that
    grows with the degree only.
    """

    def _rates(self) -> Iterable[tuple[Flow, float]]:
        affected: dict[Flow, None] = {}
        for end in self._dirty:
            affected.update(end.flows)
        shares: dict[_End, float] = {}
        for flow in affected:
            rate = flow.cap
            if flow.reserved is not None:
                over = max(end.reserved / end.capacity for end in flow.ends)
                yield flow, max(min(rate, flow.reserved / max(1.0, over)), _LEAST_RATE)
                continue
            for end in flow.ends:
                share = shares.get(end)
                if share is None:
                    share = shares[end] = end.share()
                if share < rate:
                    rate = share
            yield flow, rate if rate > _LEAST_RATE else _LEAST_RATE


class FairLinks(_SharedLinks):
    """Exact max-min over uplinks, segments, downlinks and per-flow caps."""

    def __init__(self, plan: NetworkPlan, clock: Clock, on_left: Callable[[Flow, float], None]) -> None:
        super().__init__(plan, clock, on_left)
        self._capacities = [end.capacity for end in (*self._ends, *self._segments.values())]

    def _rates(self) -> Iterable[tuple[Flow, float]]:
        flows = self._connected()
        asked = [([end.number for end in flow.ends], flow.cap, flow.reserved) for flow in flows]
        rates = max_min(self._capacities, asked)
        return zip(flows, (max(rate, _LEAST_RATE) for rate in rates), strict=True)

    def _connected(self) -> list[Flow]:
        """The flows that share a capacity, over any number of others, with what is dirty."""
        found: dict[Flow, None] = {}
        reached, waiting = dict(self._dirty), list(self._dirty)
        while waiting:
            for flow in waiting.pop().flows:
                if flow not in found:
                    found[flow] = None
                    fresh = [end for end in flow.ends if end not in reached]
                    reached.update(dict.fromkeys(fresh))
                    waiting += fresh
        return list(found)


class FifoLinks:
    """An uplink sends one message after the other at its full rate; a downlink takes them in that order.

    A message passes the downlink as it comes in (cut-through), later when the downlink is still busy.
    A flow with a reserved rate goes beside the queue, which keeps what is left of the uplink.
    """

    keeps_order = True

    def __init__(self, plan: NetworkPlan, clock: Clock, on_left: Callable[[Flow, float], None]) -> None:
        self._plan, self._clock, self._on_left = plan, clock, on_left
        self._queues: dict[int, deque[Flow]] = {}
        self._reserved: dict[int, float] = {}
        self._down_free_s: dict[int, float] = {}

    def start(self, flow: Flow) -> None:
        if flow.reserved is not None:
            self._reserved[flow.sender] = self._reserved.get(flow.sender, 0.0) + flow.reserved
            self._send(flow, min(flow.reserved, flow.cap))
            return
        queue = self._queues.setdefault(flow.sender, deque())
        queue.append(flow)
        if len(queue) == 1:
            self._send_head(queue)

    def stop(self, flow: Flow) -> None:
        if flow.stopped:
            return
        flow.remaining = flow.size_bytes - flow.sent_bytes(self._clock.clock())
        flow.stopped = True
        flow.token += 1
        self._off(flow)

    def _send_head(self, queue: deque[Flow]) -> None:
        flow = queue[0]
        up = self._plan.access[flow.sender].up_bytes_per_s
        free = up - self._reserved.get(flow.sender, 0.0)
        self._send(flow, max(min(free, flow.cap), 1e-9 * up))

    def _send(self, flow: Flow, rate: float) -> None:
        flow.start_s = flow.updated_s = self._clock.clock()
        flow.rate = rate
        self._clock.call_later(flow.size_bytes / rate, self._finish, flow, flow.token)

    def _finish(self, flow: Flow, token: int) -> None:
        if flow.token != token:
            return
        flow.remaining, flow.stopped = 0.0, True
        self._off(flow)
        now = self._clock.clock()
        down = flow.size_bytes / self._plan.access[flow.receiver].down_bytes_per_s
        through = max(self._down_free_s.get(flow.receiver, 0.0), flow.start_s) + down
        arrives = max(now, through)
        self._down_free_s[flow.receiver] = arrives
        self._on_left(flow, arrives - now)

    def _off(self, flow: Flow) -> None:
        if flow.reserved is not None:
            self._reserved[flow.sender] -= flow.reserved
            return
        queue = self._queues[flow.sender]
        was_head = queue[0] is flow
        queue.remove(flow)
        if was_head and queue:
            self._send_head(queue)
