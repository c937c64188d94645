"""Links in virtual time: how flows share uplinks, downlinks and segments, in three models.

fair: max-min over everything a flow crosses; exact, and its work per event grows with the flows.
local-fair: the smaller of the equal shares at a flow's two ends; work per event grows with the degree.
fifo: an uplink sends one message after the other; constant work per event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from edgefl.messages.base import Message
from edgefl.network import Access, NetworkPlan
from edgefl.network.maxmin import max_min


class Flow:
    """One message on its way to one receiver. size_bytes: as sent, retransmissions included."""

    __slots__ = (
        "cap", "encoded_bytes", "kind", "rate", "receiver", "remaining", "reserved", "sender",
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

    def sent_bytes(self, now: float) -> float:
        """How much has left by now."""
        if self.updated_s > now or self.rate == 0:
            return self.size_bytes - self.remaining
        return min(self.size_bytes, self.size_bytes - self.remaining + self.rate * (now - self.updated_s))


class Clock(Protocol):
    """What links ask of the kernel."""

    def clock(self) -> float: ...
    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None: ...
    def call_soon(self, call: Callable[..., None], *args: Any) -> None: ...


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


class _SharedLinks:
    """Flows whose rates change as others come and go. Rates are settled once per instant."""

    keeps_order = False

    def __init__(self, plan: NetworkPlan, clock: Clock, on_left: Callable[[Flow, float], None]) -> None:
        self._plan, self._clock, self._on_left = plan, clock, on_left
        self._dirty: dict[Any, None] = {}

    def start(self, flow: Flow) -> None:
        flow.start_s = flow.updated_s = self._clock.clock()
        self._enter(flow)
        self._touch(flow)

    def stop(self, flow: Flow) -> None:
        """Take a flow off its links, wherever it is."""
        if not flow.stopped:
            self._advance(flow, self._clock.clock())
            flow.stopped = True
            flow.token += 1
            self._leave(flow)
            self._touch(flow)

    def _enter(self, flow: Flow) -> None:
        raise NotImplementedError

    def _leave(self, flow: Flow) -> None:
        raise NotImplementedError

    def _mark(self, flow: Flow) -> None:
        """Note in _dirty what a change of this flow touches."""
        raise NotImplementedError

    def _allocate(self) -> list[tuple[Flow, float]]:
        """New rates of the flows that what is in _dirty may have changed."""
        raise NotImplementedError

    def _touch(self, flow: Flow) -> None:
        if not self._dirty:
            self._clock.call_soon(self._settle)
        self._mark(flow)

    def _settle(self) -> None:
        now = self._clock.clock()
        changed = self._allocate()
        self._dirty.clear()
        for flow, rate in changed:
            if rate != flow.rate and not flow.stopped:
                self._advance(flow, now)
                flow.rate = rate
                flow.token += 1
                self._clock.call_later(flow.remaining / rate, self._finish, flow, flow.token)

    @staticmethod
    def _advance(flow: Flow, now: float) -> None:
        flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.updated_s))
        flow.updated_s = now

    def _finish(self, flow: Flow, token: int) -> None:
        if flow.token != token:
            return
        flow.remaining, flow.updated_s, flow.stopped = 0.0, self._clock.clock(), True
        self._leave(flow)
        self._touch(flow)
        self._on_left(flow, 0.0)


class LocalFairLinks(_SharedLinks):
    """A flow gets the smaller of the equal shares at its sender's uplink and its receiver's downlink.

    What a flow leaves of its share at one end is not given to the others there: the price of work that
    grows with the degree only. Shared segments count as ends too.
    """

    def __init__(self, plan: NetworkPlan, clock: Clock, on_left: Callable[[Flow, float], None]) -> None:
        super().__init__(plan, clock, on_left)
        self._at: dict[Any, dict[Flow, None]] = {}
        self._reserved: dict[Any, float] = {}
        self._ends_of: dict[tuple[int, int], tuple[Any, ...]] = {}

    def _ends(self, flow: Flow) -> tuple[Any, ...]:
        pair = (flow.sender, flow.receiver)
        ends = self._ends_of.get(pair)
        if ends is None:
            ends = self._ends_of[pair] = _crossed(self._plan, *pair)
        return ends

    def _enter(self, flow: Flow) -> None:
        for end in self._ends(flow):
            self._at.setdefault(end, {})[flow] = None
            if flow.reserved is not None:
                self._reserved[end] = self._reserved.get(end, 0.0) + flow.reserved

    def _leave(self, flow: Flow) -> None:
        for end in self._ends(flow):
            del self._at[end][flow]
            if flow.reserved is not None:
                left = self._reserved[end] - flow.reserved
                self._reserved[end] = left if self._at[end] else 0.0

    def _mark(self, flow: Flow) -> None:
        for end in self._ends(flow):
            self._dirty[end] = None

    def _share(self, end: Any) -> float:
        flows = self._at[end]
        capacity = _capacity(self._plan, end)
        reserved = self._reserved.get(end)
        if not reserved:
            return capacity / len(flows)
        free = max(0.0, capacity - reserved)
        sharing = sum(1 for flow in flows if flow.reserved is None)
        return free / sharing if sharing else capacity

    def _allocate(self) -> list[tuple[Flow, float]]:
        affected: dict[Flow, None] = {}
        for end in self._dirty:
            affected.update(self._at.get(end, {}))
        shares: dict[Any, float] = {}
        rates = []
        for flow in affected:
            rate = flow.cap
            for end in self._ends(flow):
                if flow.reserved is not None:
                    over = self._reserved[end] / _capacity(self._plan, end)
                    rate = min(rate, flow.reserved / max(1.0, over))
                    continue
                share = shares.get(end)
                if share is None:
                    share = shares[end] = self._share(end)
                if share < rate:
                    rate = share
            rates.append((flow, max(rate, 1e-9)))
        return rates


class FairLinks(_SharedLinks):
    """Exact max-min over uplinks, segments, downlinks and per-flow caps."""

    def __init__(self, plan: NetworkPlan, clock: Clock, on_left: Callable[[Flow, float], None]) -> None:
        super().__init__(plan, clock, on_left)
        self._flows: dict[Flow, tuple[Any, ...]] = {}

    def _enter(self, flow: Flow) -> None:
        self._flows[flow] = _crossed(self._plan, flow.sender, flow.receiver)

    def _leave(self, flow: Flow) -> None:
        del self._flows[flow]

    def _mark(self, flow: Flow) -> None:
        self._dirty[flow] = None

    def _allocate(self) -> list[tuple[Flow, float]]:
        capacities = {end: _capacity(self._plan, end) for ends in self._flows.values() for end in ends}
        asked = [(ends, flow.cap, flow.reserved) for flow, ends in self._flows.items()]
        rates = max_min(capacities, asked)
        return [(flow, max(rate, 1e-9)) for flow, rate in zip(self._flows, rates, strict=True)]


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


def _crossed(plan: NetworkPlan, sender: int, receiver: int) -> tuple[Any, ...]:
    """The capacities that a flow crosses: ("up", i), ("segment", name), ("down", j)."""
    ends: list[Any] = [("up", sender)]
    for segment in (plan.access[sender].segment, plan.access[receiver].segment):
        if segment is not None and ("segment", segment) not in ends:
            ends.append(("segment", segment))
    ends.append(("down", receiver))
    return tuple(ends)


def _capacity(plan: NetworkPlan, end: Any) -> float:
    kind, which = end
    if kind == "segment":
        return plan.segments[which]
    access: Access = plan.access[which]
    return access.up_bytes_per_s if kind == "up" else access.down_bytes_per_s
