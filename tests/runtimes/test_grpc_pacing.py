"""What a link is taken to carry, from when frames leave and receipts come back."""

from __future__ import annotations

import pytest

from edgefl.runtimes.grpc.pacing import LinkEstimate, clock_us

AHEAD_S = 4294.9
"""By which the other side's clock is ahead here; it passes 2^32 microseconds within a test."""


def came(at: float) -> int:
    return clock_us(at + AHEAD_S)


def test_the_way_back_is_late_by_what_it_takes_longer_than_at_best_whatever_the_clocks_show() -> None:
    link = LinkEstimate()
    link.returned(came(0.0), 0.01)
    assert link.late_s == 0.0
    link.returned(came(0.2), 0.29)
    assert link.late_s == pytest.approx(0.08, abs=1e-4)


def test_a_shorter_way_back_becomes_the_best_one_and_lateness_fades() -> None:
    link = LinkEstimate()
    for at, back_s in ((0.0, 0.05), (0.1, 0.01), (0.2, 0.06)):
        link.returned(came(at), at + back_s)
    assert link.late_s == pytest.approx(0.05, abs=1e-4)
    for k in range(20):
        link.returned(came(0.3 + 0.01 * k), 0.31 + 0.01 * k)
    assert link.late_s < 0.001


def test_clocks_that_drift_apart_make_nothing_late() -> None:
    link = LinkEstimate()
    for at in range(0, 2000, 10):
        link.returned(clock_us(at * (1 - 5e-5)), at + 0.01)
    assert link.late_s == 0.0


def test_one_long_wait_does_not_count_beyond_its_bound() -> None:
    link = LinkEstimate()
    link.returned(came(0.0), 0.01)
    link.returned(came(0.1), 30.0)
    assert link.late_s <= 0.25
