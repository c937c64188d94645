"""A clock and link models on it, for tests: flows go in, arrivals come out."""

from __future__ import annotations

import heapq
import itertools
import math

from edgefl.network import Access, NetworkPlan, Topology
from edgefl.nodes import Message
from edgefl.runtimes.virtual.links import Flow, Lane, make_links

NOTHING = (0.0, 0.0, 0.0)
"""No latency, no jitter, no loss."""


class Kernel:
    """A clock with events, and a network on it. arrived: when each flow was all there, by name."""

    def __init__(self, links: list[Access], model: str, **plan) -> None:
        self.now, self.sequence = 0.0, itertools.count()
        self.heap: list = []
        self.soon: list = []
        self.last: list = []
        self.arrived: dict[str, float] = {}
        self.left: list[str] = []
        self.flows: list[Flow] = []
        self.instants: list[tuple[float, list[tuple[Flow, float]]]] = []
        topology = Topology("none", ((),) * len(links))
        self.plan = NetworkPlan(topology, tuple(links), model, **plan)
        self.links = make_links(self.plan, self, self._on_left)

    def clock(self) -> float:
        return self.now

    def call_later(self, delay_s, call, *args) -> None:
        heapq.heappush(self.heap, (self.now + delay_s, next(self.sequence), call, args))

    def call_soon(self, call, *args) -> None:
        self.soon.append((call, args))

    def call_last(self, call) -> None:
        self.last.append((call, ()))

    def _on_left(self, flow: Flow, hold_s: float) -> None:
        self.left.append(flow.transfer)
        self.arrived[flow.transfer] = self.now + hold_s

    def flow(self, at_s, name, sender, receiver, size, *, cap=math.inf, reserved=None) -> Flow:
        """Start a flow of `size` bytes at a time."""
        lane = Lane(sender, receiver, None, Message, cap, [0, 0, 0], (NOTHING, NOTHING), 1.0, None)
        flow = Flow(name, lane, int(size), float(size), reserved)
        self.flows.append(flow)
        self.call_later(at_s - self.now, self.links.start, flow)
        return flow

    def stop(self, at_s, flow: Flow) -> None:
        self.call_later(at_s - self.now, self.links.stop, flow)

    def run(self) -> dict[str, float]:
        """To the end; notes the rates after each instant."""
        while self.heap or self.soon or self.last:
            if self.soon:
                call, args = self.soon.pop(0)
            elif self.last and (not self.heap or self.heap[0][0] > self.now):
                call, args = self.last.pop(0)
            else:
                self._note()
                time_s, _, call, args = heapq.heappop(self.heap)
                self.now = time_s
            call(*args)
        return self.arrived

    def _note(self) -> None:
        rates = [
            (f, f.current_rate)
            for f in self.flows
            if f.rate > 0 and not f.stopped and f.updated_s <= self.now
        ]
        if not self.last and (not self.heap or self.heap[0][0] > self.now):
            self.instants.append((self.now, rates))


def transfers(model, links, *flows, **plan):
    """Arrival times by name of flows (start, name, sender, receiver, size[, more])."""
    kernel = Kernel(links, model, **plan)
    for start_s, name, sender, receiver, size, *more in flows:
        kernel.flow(start_s, name, sender, receiver, size, **(more[0] if more else {}))
    return kernel.run()
