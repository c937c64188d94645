"""What a fixed schedule takes: devices that each carry out a list of instructions, over links.

A pure function of the lists and the network, for planners; it follows the rules of the virtual runtime
(link models fair and fifo, latency, copying at the receiver) for programs whose order is fixed in advance.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from edgefl.network.maxmin import max_min

Tag = Hashable


@dataclass(frozen=True)
class Compute:
    """Keep the processor busy. label: what for."""

    seconds: float
    label: Hashable = None


@dataclass(frozen=True)
class Send:
    """Start sending and go on. kind: messages of one kind to one receiver keep their order."""

    to: int
    tag: Tag
    size_bytes: float
    kind: str


@dataclass(frozen=True)
class Receive:
    """Wait until a message has come from a device."""

    sender: int
    tag: Tag


Instruction = Compute | Send | Receive


@dataclass(frozen=True)
class Links:
    """The network of a schedule: access rates in bytes per second and one-way latency in seconds, by device.

    copy_bytes_per_s: at which a receiver takes a message in. separate: each pair and direction has a link of
    its own, at the slower of its two ends. caps: most of one flow, by (sender, receiver). segment_of: the
    shared segment that a device's traffic crosses, where it has one; segments: their rates (fair alone).
    """

    up: Mapping[int, float]
    down: Mapping[int, float]
    latency_s: Mapping[int, float]
    copy_bytes_per_s: Mapping[int, float]
    model: Literal["fair", "fifo", "separate"] = "fair"
    caps: Mapping[tuple[int, int], float] = field(default_factory=dict)
    segment_of: Mapping[int, str] = field(default_factory=dict)
    segments: Mapping[str, float] = field(default_factory=dict)

    def cap(self, sender: int, receiver: int) -> float:
        return self.caps.get((sender, receiver), math.inf)

    def crossed(self, sender: int, receiver: int) -> dict[Hashable, float]:
        """The shared capacities that a flow crosses."""
        found: dict[Hashable, float] = {
            ("up", sender): self.up[sender],
            ("down", receiver): self.down[receiver],
        }
        for end in (sender, receiver):
            if (name := self.segment_of.get(end)) is not None:
                found["segment", name] = self.segments[name]
        return found

    def rate(self, sender: int, receiver: int) -> float:
        """Of one flow that has the links to itself."""
        return min(*self.crossed(sender, receiver).values(), self.cap(sender, receiver))


@dataclass(frozen=True)
class Run:
    """What a schedule came to. ends_s, busy_s: by device; spans: (start, end, label) of its computing."""

    makespan_s: float
    ends_s: Mapping[int, float]
    busy_s: Mapping[int, float]
    spans: Mapping[int, Sequence[tuple[float, float, Hashable]]]

    def bubble(self, device: int) -> float:
        """Share of the makespan in which the device does not compute."""
        return 1 - self.busy_s[device] / self.makespan_s


@dataclass
class _Flow:
    sender: int
    send: Send
    left: float
    start_s: float = 0.0
    rate: float = 0.0
    token: int = 0


@dataclass
class _Device:
    instructions: Sequence[Instruction]
    at: int = 0
    waits_for: tuple[int, Tag] | None = None
    arrived: set[tuple[int, Tag]] = field(default_factory=set)
    end_s: float = 0.0
    busy_s: float = 0.0
    spans: list[tuple[float, float, Hashable]] = field(default_factory=list)


def simulate(programs: Mapping[int, Sequence[Instruction]], links: Links) -> Run:
    """Carry out the lists. Raises ValueError when a device waits for what nobody sends."""
    kernel = _Kernel(programs, links)
    kernel.run()
    devices = kernel.devices
    stuck = {i: d.waits_for for i, d in devices.items() if d.at < len(d.instructions)}
    if stuck:
        raise ValueError(f"this schedule never ends: {stuck}")
    return Run(
        makespan_s=max(d.end_s for d in devices.values()),
        ends_s={i: d.end_s for i, d in devices.items()},
        busy_s={i: d.busy_s for i, d in devices.items()},
        spans={i: d.spans for i, d in devices.items()},
    )


class _Kernel:
    def __init__(self, programs: Mapping[int, Sequence[Instruction]], links: Links) -> None:
        self.devices = {i: _Device(instructions) for i, instructions in programs.items()}
        self.links, self.now = links, 0.0
        self._heap: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._sequence = 0
        self._flows: dict[int, _Flow] = {}
        self._queues: dict[Hashable, deque[_Flow]] = {}
        self._down_free_s: dict[int, float] = {}

    def run(self) -> None:
        for i in self.devices:
            self._at(0.0, self._advance, i)
        while self._heap:
            self.now, _, call, args = heapq.heappop(self._heap)
            call(*args)

    def _at(self, time_s: float, call: Any, *args: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, self._sequence, call, args))

    def _advance(self, i: int) -> None:
        """Go through a device's list until it computes or waits."""
        device = self.devices[i]
        while device.at < len(device.instructions):
            one = device.instructions[device.at]
            if isinstance(one, Receive):
                if (one.sender, one.tag) not in device.arrived:
                    device.waits_for = (one.sender, one.tag)
                    return
                device.waits_for = None
            device.at += 1
            if isinstance(one, Send):
                self._send(_Flow(i, one, one.size_bytes))
            elif isinstance(one, Compute):
                end_s = self.now + one.seconds
                device.busy_s += one.seconds
                device.spans.append((self.now, end_s, one.label))
                self._at(end_s, self._advance, i)
                return
        device.end_s = self.now

    def _arrive(self, flow: _Flow) -> None:
        device = self.devices[flow.send.to]
        device.arrived.add((flow.sender, flow.send.tag))
        if device.waits_for == (flow.sender, flow.send.tag):
            self._advance(flow.send.to)

    # --- links ----------------------------------------------------------------------------------------

    def _send(self, flow: _Flow) -> None:
        """fifo: one queue per uplink; else one per pair and kind, whose heads share what they cross."""
        model = self.links.model
        lane: Hashable = flow.sender if model == "fifo" else (flow.sender, flow.send.to)
        if model == "fair":
            lane = (flow.sender, flow.send.to, flow.send.kind)
        queue = self._queues.setdefault(lane, deque())
        queue.append(flow)
        if len(queue) == 1:
            self._start(queue, lane)

    def _start(self, queue: deque[_Flow], lane: Hashable) -> None:
        flow = queue[0]
        flow.start_s = self.now
        if self.links.model == "fair":
            self._flows[id(flow)] = flow
            self._share(lane)
            return
        up, down = self.links.up[flow.sender], self.links.down[flow.send.to]
        cap = self.links.cap(flow.sender, flow.send.to)
        rate = min(up, cap) if self.links.model == "fifo" else min(up, down, cap)
        self._at(self.now + flow.left / rate, self._left, lane)

    def _left(self, lane: Hashable) -> None:
        """The head of a queue has left: it arrives, and the next one starts."""
        queue = self._queues[lane]
        flow = queue.popleft()
        hold_s = 0.0
        if self.links.model == "fifo":
            down_s = flow.send.size_bytes / self.links.down[flow.send.to]
            through = max(self._down_free_s.get(flow.send.to, 0.0), flow.start_s) + down_s
            self._down_free_s[flow.send.to] = max(self.now, through)
            hold_s = max(0.0, through - self.now)
        to = flow.send.to
        latency_s = self.links.latency_s[flow.sender] + self.links.latency_s[to]
        copying_s = flow.send.size_bytes / self.links.copy_bytes_per_s[to]
        self._at(self.now + hold_s + latency_s + copying_s, self._arrive, flow)
        if queue:
            self._start(queue, lane)

    def _share(self, _: Hashable) -> None:
        """Max-min rates for all flows under way, from now on."""
        flows = list(self._flows.values())
        crossed = [self.links.crossed(f.sender, f.send.to) for f in flows]
        ends = {end: rate for one in crossed for end, rate in one.items()}
        places = {end: n for n, end in enumerate(ends)}
        asked = [
            (tuple(places[end] for end in one), self.links.cap(f.sender, f.send.to), None)
            for f, one in zip(flows, crossed, strict=True)
        ]
        for flow, rate in zip(flows, max_min(list(ends.values()), asked), strict=True):
            flow.left -= flow.rate * (self.now - flow.start_s)
            flow.start_s, flow.rate = self.now, rate
            flow.token += 1
            self._at(self.now + flow.left / rate, self._fair_end, flow, flow.token)

    def _fair_end(self, flow: _Flow, token: int) -> None:
        if flow.token != token:
            return
        del self._flows[id(flow)]
        flow.token += 1
        lane = (flow.sender, flow.send.to, flow.send.kind)
        self._left(lane)
        if self._flows:
            self._share(lane)
