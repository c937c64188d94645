"""Links on which flows share capacities at once: exactly max-min, or by equal shares at both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mypy_extensions import mypyc_attr

from edgefl.network import NetworkPlan
from edgefl.network.maxmin import max_min
from edgefl.runtimes.virtual.hubs import LEAST_RATE, Hub
from edgefl.runtimes.virtual.transit import Clock, Flow, Lane

_LEAST_HUB = 8
"""Flows from which an end that is the centre of a star is treated as a hub; below, it gains nothing."""
_ROUNDING = 1e-9
"""Relative difference between rates that are taken as equal."""


@mypyc_attr(allow_interpreted_subclasses=True)
class End:
    """One capacity and the flows that cross it now. capacity, reserved: in bytes per second."""

    __slots__ = ("capacity", "crowded", "flows", "hub", "level", "number", "reserved", "sharing")

    def __init__(self, number: int, capacity: float) -> None:
        self.number, self.capacity = number, capacity
        self.flows: dict[Flow, None] = {}
        self.reserved = 0.0
        self.sharing = 0
        """Flows without a reservation."""
        self.level = capacity
        """What each of them got when rates were last settled."""
        self.crowded = 0
        """Flows that do not have all their other ends to themselves."""
        self.hub: Hub | None = None

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

    def is_star(self) -> bool:
        """Whether it is the centre of a star that is worth a hub, or goes on being one."""
        least = _LEAST_HUB if self.hub is None else 2
        return not self.crowded and len(self.flows) >= least and self.sharing == len(self.flows)


@mypyc_attr(allow_interpreted_subclasses=True)
class SharedLinks:
    """Flows whose rates change as others come and go. Rates are settled once per instant, at its end."""

    keeps_order = False
    redistributes = False

    def __init__(self, plan: NetworkPlan, clock: Clock, on_left: Callable[[Flow, float], None]) -> None:
        self._clock, self._on_left = clock, on_left
        self.ending = self.finish  # bound once, for all events
        n = len(plan.access)
        self._ends = [End(i, a.up_bytes_per_s) for i, a in enumerate(plan.access)]
        self._ends += [End(n + i, a.down_bytes_per_s) for i, a in enumerate(plan.access)]
        self._segments = {name: End(2 * n + k, rate) for k, (name, rate) in enumerate(plan.segments.items())}
        self._segment_of = [None if a.segment is None else self._segments[a.segment] for a in plan.access]
        self._dirty: dict[End, None] = {}
        self._plan = plan
        self.numbered = 0
        """Counts places in hubs."""

    def begin(self) -> None:
        """A run begins: the traces do."""
        for node in self._plan.traces:
            self._follow(node)

    def _follow(self, node: int) -> None:
        """Rates of a node are what its trace says from now on, until its next step."""
        now, trace = self._clock.clock(), self._plan.traces[node]
        factor, access = trace.value(now), self._plan.access[node]
        up, down = self._ends[node], self._ends[len(self._segment_of) + node]
        self._change(up, max(access.up_bytes_per_s * factor, LEAST_RATE), now)
        self._change(down, max(access.down_bytes_per_s * factor, LEAST_RATE), now)
        next_s = trace.next_change_s(now)
        if next_s != float("inf"):
            self._clock.call_aside(next_s - now, self._follow, node)

    def _change(self, end: End, capacity: float, now: float) -> None:
        """An end offers another rate now."""
        end.capacity = capacity
        for flow in list(end.flows):
            flow.most = min((flow.lane.cap, *(one.capacity for one in flow.ends)))
            if flow.hub is not None:  # its place there went by what it could take
                hub = flow.hub
                hub.leave(flow, now)
                hub.enter(flow, now)
            for one in flow.ends:
                self._mark(one)

    def _crossed(self, lane: Lane) -> tuple[End, ...]:
        """The capacities that the flows of a lane cross: uplink, segments, downlink."""
        up, down = self._ends[lane.sender], self._ends[len(self._segment_of) + lane.receiver]
        segments = (self._segment_of[lane.sender], self._segment_of[lane.receiver])
        return tuple(dict.fromkeys(end for end in (up, *segments, down) if end is not None))

    def start(self, flow: Flow) -> None:
        flow.start_s = flow.updated_s = self._clock.clock()
        lane = flow.lane
        if not lane.crosses:
            lane.crosses = self._crossed(lane)
        flow.ends = lane.crosses
        for end in flow.ends:
            end.enter(flow)
            if end.capacity < flow.most:
                flow.most = end.capacity
        if not self._segments:
            self._crowd(flow, 1)
            if flow.reserved is None:
                for end in flow.ends:
                    if end.hub is not None and flow.hub is None:
                        end.hub.enter(flow, flow.start_s)
        hub = flow.hub
        for end in flow.ends:
            if hub is None or hub.end is end or len(end.flows) > 1:  # a hub looks after its leaves
                self._mark(end)

    def stop(self, flow: Flow) -> None:
        """Take a flow off its links, wherever it is."""
        if not flow.stopped:
            if flow.hub is None:
                self.advance(flow, self._clock.clock())
            self._off(flow)

    def _off(self, flow: Flow) -> None:
        flow.stopped = True
        flow.token += 1
        if flow.hub is not None:
            flow.hub.leave(flow, self._clock.clock())
        if not self._segments:
            self._crowd(flow, -1)
        for end in flow.ends:
            end.leave(flow)
            if end.flows or end.hub is not None:
                self._mark(end)

    def _crowd(self, flow: Flow, by: int) -> None:
        """Count, as a flow comes or before it goes, who does not have the other end alone. Flows that cross
        segments are no stars, and are not counted."""
        up, down = flow.ends
        sent, received = len(up.flows), len(down.flows)
        if sent > 1:
            down.crowded += by
            if sent == 2:
                self._crowd_other(flow, up, by)
        if received > 1:
            up.crowded += by
            if received == 2:
                self._crowd_other(flow, down, by)

    def _crowd_other(self, flow: Flow, here: End, by: int) -> None:
        """The one flow beside this one loses, or is given back, having this end alone."""
        first, second = here.flows
        other = second if first is flow else first
        far = other.ends[1] if other.ends[0] is here else other.ends[0]
        far.crowded += by
        self._mark(far)

    def _mark(self, end: End) -> None:
        """Rates at this end are to be settled at the end of the instant."""
        if not self._dirty:
            self._clock.call_last(self._settle)
        self._dirty[end] = None

    def _settle(self) -> None:
        now, dirty = self._clock.clock(), self._dirty
        for end in dirty:
            if end.sharing:
                end.level = max(0.0, end.capacity - end.reserved) / end.sharing
            if end.hub is not None or (len(end.flows) >= _LEAST_HUB and not self._segments):
                self._settle_hub(end, now)
        loose = [end for end in dirty if end.flows and end.hub is None and not _is_leaf(end)]
        if loose:
            later, ending = self._clock.call_later, self.ending
            for flow, rate in self._changed(loose):
                if flow.rate:
                    self.advance(flow, now)
                flow.rate = rate
                flow.token += 1
                later(flow.remaining / rate, ending, flow, flow.token)
        dirty.clear()

    def _settle_hub(self, end: End, now: float) -> None:
        if end.is_star():
            hub = end.hub if end.hub is not None else Hub(end, self, self.redistributes, now)
            hub.settle(now)
        elif end.hub is not None:
            end.hub.dissolve(now)

    def _changed(self, dirty: Iterable[End]) -> Iterable[tuple[Flow, float]]:
        """Flows outside hubs whose rates are others now, as these ends have changed; with their rates."""
        raise NotImplementedError

    # --- what hubs ask ---------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock.clock()

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self._clock.call_later(delay_s, call, *args)

    @staticmethod
    def advance(flow: Flow, now: float) -> None:
        """Take off a flow what it has sent at its own rate up to now."""
        flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.updated_s))
        flow.updated_s = now

    def finish(self, flow: Flow, token: int) -> None:
        """A flow that goes at its own rate ends now, unless its rate has changed since."""
        if flow.token == token:
            self.ended(flow, self._clock.clock())

    def ended(self, flow: Flow, now: float) -> None:
        """The last byte of a flow has left."""
        self._off(flow)
        flow.remaining, flow.updated_s = 0.0, now
        self._on_left(flow, 0.0)


def _is_leaf(end: End) -> bool:
    """Whether an end has nothing but a flow that a hub looks after."""
    return len(end.flows) == 1 and next(iter(end.flows)).hub is not None


@mypyc_attr(allow_interpreted_subclasses=True)
class LocalFairLinks(SharedLinks):
    """A flow gets the smallest of the equal shares at the ends that it crosses.

    What a flow leaves of its share at one end is not given to the others there: the price of work that
    grows with the degree only.
    """

    def _changed(self, dirty: Iterable[End]) -> Iterable[tuple[Flow, float]]:
        affected: dict[Flow, None] = {}
        for end in dirty:
            affected.update(end.flows)
        found = []
        for flow in affected:
            rate = flow.lane.cap
            if flow.reserved is not None:
                over = max(end.reserved / end.capacity for end in flow.ends)
                rate = min(rate, flow.reserved / max(1.0, over))
            else:
                for end in flow.ends:
                    if end.level < rate:
                        rate = end.level
            if rate < LEAST_RATE:
                rate = LEAST_RATE
            if rate != flow.rate:
                found.append((flow, rate))
        return found


@mypyc_attr(allow_interpreted_subclasses=True)
class FairLinks(SharedLinks):
    """Exact max-min over uplinks, segments, downlinks and per-flow caps."""

    redistributes = True

    def __init__(self, plan: NetworkPlan, clock: Clock, on_left: Callable[[Flow, float], None]) -> None:
        super().__init__(plan, clock, on_left)
        self._capacities = [end.capacity for end in (*self._ends, *self._segments.values())]

    def _change(self, end: End, capacity: float, now: float) -> None:
        self._capacities[end.number] = capacity
        super()._change(end, capacity, now)

    def _changed(self, dirty: Iterable[End]) -> Iterable[tuple[Flow, float]]:
        found = _by_level(dirty)
        return self._filled(dirty) if found is None else found

    def _filled(self, dirty: Iterable[End]) -> Iterable[tuple[Flow, float]]:
        """Progressive filling among all flows that share anything with these ends."""
        flows = _connected(dirty)
        asked = [([end.number for end in flow.ends], flow.lane.cap, flow.reserved) for flow in flows]
        for flow, found in zip(flows, max_min(self._capacities, asked), strict=True):
            rate = max(found, LEAST_RATE)
            if rate != flow.rate:
                yield flow, rate


def _by_level(dirty: Iterable[End]) -> list[tuple[Flow, float]] | None:
    """Flows of these ends that get another rate, if equal shares at both ends are max-min; else None.

    All other flows keep what they have, which was max-min before. It still is, together with the new rates,
    where no end gives more than it has and each flow that a change touches is held by something: by its own
    most, or by an end that is full and gives nobody more. So it is wherever degrees and rates are alike, and
    costs nothing for the flows that are farther away.
    """
    rates: dict[Flow, float] = {}
    touched: dict[End, None] = {}
    for end in dirty:
        for flow in end.flows:
            if flow in rates:
                continue
            if flow.reserved is not None:
                return None
            rate = flow.most
            for other in flow.ends:
                if other.level < rate:
                    rate = other.level
            if rate < LEAST_RATE:
                rate = LEAST_RATE
            rates[flow] = rate
            if rate != flow.rate:
                touched.update(dict.fromkeys(flow.ends))
    held = dict(rates)
    for end in touched:
        most = end.level * (1 + _ROUNDING)
        for flow in end.flows:
            rate = held.setdefault(flow, flow.rate)
            if rate > most or flow.reserved is not None:
                return None
    if not _all_held(held):
        return None
    return [(flow, rate) for flow, rate in rates.items() if rate != flow.rate]


def _all_held(rates: dict[Flow, float]) -> bool:
    """Whether each of these flows has all that it can take, or crosses an end whose flows get equal shares of
    all that it has. Flows that are not given keep their rates."""
    is_full: dict[End, bool] = {}
    for flow, rate in rates.items():
        if rate >= flow.most * (1 - _ROUNDING):
            continue
        for end in flow.ends:
            full = is_full.get(end)
            if full is None:
                least = end.level * (1 - _ROUNDING)
                full = True
                for other in end.flows:
                    if rates.get(other, other.rate) < least:
                        full = False
                        break
                is_full[end] = full
            if full:
                break
        else:
            return False
    return True


def _connected(ends: Iterable[End]) -> list[Flow]:
    """The flows that share a capacity, over any number of others, with these ends."""
    found: dict[Flow, None] = {}
    waiting = list(ends)
    reached = dict.fromkeys(waiting)
    while waiting:
        for flow in waiting.pop().flows:
            if flow not in found:
                found[flow] = None
                fresh = [end for end in flow.ends if end not in reached]
                reached.update(dict.fromkeys(fresh))
                waiting += fresh
    return list(found)
