"""One capacity that many flows share while nothing else is shared: a server's uplink or downlink.

Such flows form a star: each crosses the hub and one end that it has to itself. Whoever cannot use an equal
share of the hub goes at its own most; all others go at one common level, so they end in the order of what
they had left when they came. The hub keeps how many bytes a flow at the level has been given since it
began, and one event for the first of them to end: work per event grows with the logarithm of the flows,
where giving each flow a rate of its own grows with their number.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from edgefl.runtimes.virtual.sharing import End, SharedLinks
    from edgefl.runtimes.virtual.transit import Flow

_INF = float("inf")
LEAST_RATE = 1e-9  # bytes per second; a flow that gets nothing still ends some day


@mypyc_attr(allow_interpreted_subclasses=True)
class Hub:
    """The flows of one end while it is the centre of a star.

    redistributes: what flows at their own most leave of their equal share goes to the others (max-min);
    else the level is the equal share.
    """

    __slots__ = (
        "_capped", "_capped_rate", "_count", "_ends", "_fastest", "_level", "_links", "_next", "_served",
        "_slowest", "_token", "_updated_s", "end", "redistributes",
    )  # fmt: skip

    def __init__(self, end: End, links: SharedLinks, redistributes: bool, now: float) -> None:
        self.end, self._links, self.redistributes = end, links, redistributes
        self._level, self._served, self._updated_s = _INF, 0.0, now
        self._count = self._token = self._next = 0
        self._capped: dict[Flow, float] = {}
        self._capped_rate = 0.0
        self._ends: list[tuple[float, int, Flow]] = []
        """Flows at the level by `served` at their end; one that has left or changed is recognised by its
        number."""
        self._slowest: list[tuple[float, int, Flow]] = []
        """Flows at the level by the most that they could take."""
        self._fastest: list[tuple[float, int, Flow]] = []
        """Flows at their own most, the fastest first."""
        end.hub = self
        for flow in end.flows:
            links.advance(flow, now)
            flow.token += 1
            self.enter(flow, now)

    def enter(self, flow: Flow, now: float) -> None:
        """A flow comes to the hub; its rate follows from the next `settle`."""
        flow.hub = self
        if self.redistributes and not self._count and self._capped_rate + flow.most <= self.end.capacity:
            self._go(flow, flow.most)  # as it is while nobody has to share
        else:
            self._serve(now)
            self._to_level(flow)

    def rate(self, flow: Flow) -> float:
        """What a flow here gets now."""
        return self._capped.get(flow, self._level)

    def leave(self, flow: Flow, now: float) -> None:
        """A flow leaves; what it had left is told to it."""
        flow.hub = None
        if flow in self._capped:
            self._links.advance(flow, now)
            self._from_capped(flow)
        else:
            self._serve(now)
            flow.remaining, flow.updated_s = max(0.0, flow.goal - self._served), now
            flow.number = -1
            self._count -= 1

    def dissolve(self, now: float) -> None:
        """The end is no hub any more: its flows go their own ways."""
        for flow in self.end.flows:
            if flow.hub is self:
                self.leave(flow, now)
                flow.rate = 0.0
                flow.token += 1
        self.end.hub = None
        self._token += 1

    def settle(self, now: float) -> None:
        """Find the level, and when the first flow at it ends."""
        if not self._count:
            _first(self._fastest)  # those that have left are let go of
            if self._level != _INF:
                self._level, self._next = _INF, -1
                self._token += 1
            return
        self._serve(now)
        before = self._level
        while True:
            level = self._fair_level()
            fastest, slowest = _first(self._fastest), _first(self._slowest)
            if fastest is not None and fastest[0] < -level:
                self._release(fastest[2], now)
            elif slowest is not None and slowest[0] <= level:
                self._cap(slowest[2], slowest[0], now)
            else:
                break
        self._level = level
        first = _first(self._ends)
        number = -1 if first is None else first[1]
        if level == before and number == self._next:
            return
        self._token += 1
        self._next = number
        if first is None:
            return
        self._links.later(max(0.0, first[0] - self._served) / level, self._finish, self._token)

    def _fair_level(self) -> float:
        if not self._count:
            return _INF
        capacity = self.end.capacity
        if self.redistributes:
            return max((capacity - self._capped_rate) / self._count, LEAST_RATE)
        return max(capacity / len(self.end.flows), LEAST_RATE)

    def _serve(self, now: float) -> None:
        """Bring what a flow at the level has been given up to now."""
        if self._count and self._level != _INF:
            self._served += self._level * (now - self._updated_s)
        self._updated_s = now

    def _to_level(self, flow: Flow) -> None:
        self._links.numbered += 1
        flow.number = self._links.numbered
        flow.goal = self._served + flow.remaining
        flow.rate = LEAST_RATE  # on its way; the level says how fast
        heappush(self._ends, (flow.goal, flow.number, flow))
        heappush(self._slowest, (flow.most, flow.number, flow))
        self._count += 1

    def _cap(self, flow: Flow, rate: float, now: float) -> None:
        """A flow cannot use the level: it goes at its own most."""
        flow.remaining, flow.updated_s = max(0.0, flow.goal - self._served), now
        self._count -= 1
        self._go(flow, rate)

    def _go(self, flow: Flow, rate: float) -> None:
        """A flow goes at a rate of its own from now on."""
        self._links.numbered += 1
        flow.number, flow.rate = self._links.numbered, max(rate, LEAST_RATE)
        flow.token += 1
        self._capped[flow] = flow.rate
        self._capped_rate += flow.rate
        heappush(self._fastest, (-flow.rate, flow.number, flow))
        self._links.later(flow.remaining / flow.rate, self._links.ending, flow, flow.token)

    def _release(self, flow: Flow, now: float) -> None:
        """The level has sunk below a flow's own most: it joins the others."""
        self._links.advance(flow, now)
        self._from_capped(flow)
        self._to_level(flow)

    def _from_capped(self, flow: Flow) -> None:
        rate = self._capped.pop(flow)
        self._capped_rate = self._capped_rate - rate if self._capped else 0.0
        flow.number = -1
        flow.token += 1

    def _finish(self, token: int) -> None:
        """The first flows at the level have ended."""
        if token != self._token:
            return
        now = self._links.now()
        first = _first(self._ends)
        assert first is not None
        self._served, self._updated_s = max(self._served, first[0]), now
        while (first := _first(self._ends)) is not None and first[0] <= self._served:
            self._links.ended(first[2], now)


def _first(heap: list[tuple[float, int, Flow]]) -> tuple[float, int, Flow] | None:
    """The first entry that still counts."""
    while heap:
        entry = heap[0]
        if entry[2].number == entry[1]:
            return entry
        heappop(heap)
    return None
