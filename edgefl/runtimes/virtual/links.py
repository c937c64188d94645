"""Links in virtual time: how flows share uplinks, downlinks and segments, in three models.

fair: max-min over everything a flow crosses; exact, and its work per event grows with the flows that
share anything with those that change, but for stars around one hub, where it does not.
local-fair: the smaller of the equal shares at a flow's two ends; work per event grows with the degree.
fifo: an uplink sends one message after the other; constant work per event.

Where a trace moves a node's rates, the first two follow it at each of its steps; with fifo a message keeps
the rate at which it started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from edgefl.network import NetworkPlan
from edgefl.runtimes.virtual.sharing import FairLinks, LocalFairLinks
from edgefl.runtimes.virtual.transit import Clock, Flow, Links

__all__ = ["Clock", "Flow", "Links", "make_links"]


def make_links(plan: NetworkPlan, clock: Clock, on_left: Callable[[Flow, float], None]) -> Links:
    """The links of a run under the plan's link model."""
    if plan.link_model == "fifo":
        return FifoLinks(plan, clock, on_left)
    if plan.link_model == "local-fair":
        return LocalFairLinks(plan, clock, on_left)
    return FairLinks(plan, clock, on_left)


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

    def begin(self) -> None:
        """Nothing to prepare: what rates are is asked when a message starts."""

    def _factor(self, node: int) -> float:
        """What a trace leaves of a node's rates now."""
        trace = self._plan.traces.get(node)
        return 1.0 if trace is None else max(trace.value(self._clock.clock()), 1e-9)

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
        up = self._plan.access[flow.sender].up_bytes_per_s * self._factor(flow.sender)
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
        rate = self._plan.access[flow.receiver].down_bytes_per_s * self._factor(flow.receiver)
        down = flow.size_bytes / rate
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
