"""Links in virtual time: how flows share uplinks, downlinks and segments, in three models.

fair: max-min over everything a flow crosses; exact. Where equal shares at both ends are max-min, and in stars
around one hub, a change concerns the flows nearby; elsewhere all that share anything with those that change.
local-fair: the smaller of the equal shares at a flow's two ends; work per event grows with the degree.
fifo: an uplink sends one message after the other; constant work per event.

Where a trace moves a node's rates, the first two follow it at each of its steps; with fifo a message keeps
the rate at which it started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mypy_extensions import mypyc_attr

from edgefl.network import NetworkPlan
from edgefl.runtimes.virtual.sharing import FairLinks, LocalFairLinks
from edgefl.runtimes.virtual.transit import Clock, Flow, Lane, Links

__all__ = ["Clock", "Flow", "Lane", "Links", "make_links"]


def make_links(plan: NetworkPlan, clock: Clock, on_left: Callable[[Flow, float], None]) -> Links:
    """The links of a run under the plan's link model."""
    if plan.link_model == "fifo":
        return FifoLinks(plan, clock, on_left)
    if plan.link_model == "local-fair":
        return LocalFairLinks(plan, clock, on_left)
    return FairLinks(plan, clock, on_left)


@mypyc_attr(allow_interpreted_subclasses=True)
class FifoLinks:
    """An uplink sends one message after the other at its full rate; a downlink takes them in that order.

    A message passes the downlink as it comes in (cut-through), later when the downlink is still busy.
    A flow with a reserved rate goes beside the queue, which keeps what is left of the uplink.
    """

    keeps_order = True

    def __init__(self, plan: NetworkPlan, clock: Clock, on_left: Callable[[Flow, float], None]) -> None:
        self._clock, self._on_left, self._traces = clock, on_left, plan.traces
        self._up = [access.up_bytes_per_s for access in plan.access]
        self._down = [access.down_bytes_per_s for access in plan.access]
        self._queues: list[deque[Flow] | None] = [None] * len(plan.access)
        self._reserved: dict[int, float] = {}
        self._down_free_s = [0.0] * len(plan.access)
        self._ended = self._finish  # bound once, for all events

    def begin(self) -> None:
        """Nothing to prepare: what rates are is asked when a message starts."""

    def _now(self, rates: list[float], node: int) -> float:
        """What a node's trace leaves of its rate now."""
        trace = self._traces.get(node)
        return rates[node] if trace is None else rates[node] * max(trace.value(self._clock.clock()), 1e-9)

    def start(self, flow: Flow) -> None:
        if flow.reserved is not None:
            sender = flow.lane.sender
            self._reserved[sender] = self._reserved.get(sender, 0.0) + flow.reserved
            self._send(flow, min(flow.reserved, flow.lane.cap))
            return
        queue = self._queues[flow.lane.sender]
        if queue is None:
            queue = self._queues[flow.lane.sender] = deque()
        queue.append(flow)
        if len(queue) == 1:
            self._send_head(queue)

    def stop(self, flow: Flow) -> None:
        if flow.stopped:
            return
        flow.remaining = flow.size_bytes - flow.sent_bytes(self._clock.clock())
        flow.stopped = True
        self._off(flow)

    def _send_head(self, queue: deque[Flow]) -> None:
        flow = queue[0]
        lane = flow.lane
        up = self._now(self._up, lane.sender)
        free = up - self._reserved.get(lane.sender, 0.0) if self._reserved else up
        self._send(flow, max(min(free, lane.cap), 1e-9 * up))

    def _send(self, flow: Flow, rate: float) -> None:
        flow.start_s = flow.updated_s = self._clock.clock()
        flow.rate = rate
        self._clock.call_later(flow.size_bytes / rate, self._ended, flow)

    def _finish(self, flow: Flow) -> None:
        if flow.stopped:
            return
        flow.remaining, flow.stopped = 0.0, True
        self._off(flow)
        now, receiver = self._clock.clock(), flow.lane.receiver
        down = flow.size_bytes / self._now(self._down, receiver)
        through = max(self._down_free_s[receiver], flow.start_s) + down
        arrives = self._down_free_s[receiver] = max(now, through)
        self._on_left(flow, arrives - now)

    def _off(self, flow: Flow) -> None:
        if flow.reserved is not None:
            self._reserved[flow.lane.sender] -= flow.reserved
            return
        queue = self._queues[flow.lane.sender]
        assert queue is not None
        if queue[0] is not flow:
            queue.remove(flow)
            return
        queue.popleft()
        if queue:
            self._send_head(queue)
