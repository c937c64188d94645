"""How fast bytes may leave: a process's uplink, and what the link turns out to carry."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

_BURST_S = 0.002
"""Shorter waits are saved up: a timer is good for about a millisecond."""
_CLOCK = 1 << 32
_MOST_DRIFT = 1e-4
"""Seconds per second by which one process's clock may run ahead of another's."""
_MOST_LATE_S = 0.25
"""More is not the other direction's doing."""


class Uplink:
    """The uplink of a process, shared by all of its connections, frame by frame in turn.

    rate_bytes_per_s: None leaves it to the real link.
    """

    def __init__(self, rate_bytes_per_s: float | None) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self._turn = asyncio.Lock()
        self._free_at = 0.0

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Inside, the uplink is this connection's; others wait in line. Without a rate nobody waits."""
        return nullcontext() if self.rate_bytes_per_s is None else self._turn

    async def transmit(self, num_bytes: int) -> None:
        """Return when that many bytes have left."""
        if self.rate_bytes_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + num_bytes / self.rate_bytes_per_s
        if self._free_at - now > _BURST_S:
            await asyncio.sleep(self._free_at - now)


class LinkEstimate:
    """Round-trip time and rate of a connection, from when frames left and when receipts came.

    late_s: how much longer receipts are on their way back than at best, for they wait behind what their
    sender has under way. A window that does not grow by that gives way to traffic in the other direction,
    which then holds the receipts back even longer.

    Source: the delivery-rate sample of BBR (Cardwell et al. 2017, https://doi.org/10.1145/3009824).
    """

    def __init__(self) -> None:
        self.rtt_s: float | None = None
        self.rate_bytes_per_s: float | None = None
        self.late_s = 0.0
        self._received = 0
        self._least_back: tuple[int, float] | None = None
        """The shortest way back so far, give or take what the two clocks differ, and when that was."""

    def mark(self, now: float) -> tuple[float, int]:
        """To be kept with a frame that leaves now."""
        return now, self._received

    def receipt(self, num_bytes: int, mark: tuple[float, int], now: float, *, sustained: bool) -> None:
        """The frame of this mark and size has been received; sustained: more of its message was waiting.

        The last frame of a message tells little of the rate: nothing may have left after it.
        """
        self._received += num_bytes
        left_at, received_then = mark
        took_s = max(now - left_at, 1e-6)
        self.rtt_s = took_s if self.rtt_s is None else min(self.rtt_s, took_s)
        sample, before = (self._received - received_then) / took_s, self.rate_bytes_per_s
        if before is None:
            self.rate_bytes_per_s = sample if sustained else None
        elif sample > before or sustained:
            self.rate_bytes_per_s = max(sample, 0.9 * before + 0.1 * sample)

    def returned(self, came_us: int, now: float) -> None:
        """A receipt is back now; what it confirms had come at `came_us` by the other side's clock."""
        back_us = clock_us(now) - came_us
        least_us, since = self._least_back or (back_us, now)
        late_s = _signed(back_us - least_us) / 1e6 - _MOST_DRIFT * (now - since)
        if late_s <= 0:
            self._least_back, late_s = (back_us, now), 0.0
        late_s = min(late_s, _MOST_LATE_S)
        self.late_s = max(late_s, 0.8 * self.late_s + 0.2 * late_s)


def clock_us(now: float) -> int:
    """A time as receipts have it, in microseconds modulo 2^32; never 0, which means unsaid."""
    return int(now * 1e6) % _CLOCK or 1


def _signed(difference_us: int) -> int:
    return (difference_us + _CLOCK // 2) % _CLOCK - _CLOCK // 2
