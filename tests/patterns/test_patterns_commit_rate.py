"""The curve through three losses, and the search for a commit rate."""

from __future__ import annotations

import math

import pytest

from edgefl.patterns.commit_rate import INVALID, RateSearch, implicit_momentum, reward


def curve(t, a_squared=0.03, b=0.5, d=0.2):
    return 1 / (a_squared * t + b) + d


@pytest.mark.parametrize("start_s", [0, 10, 500])
@pytest.mark.parametrize("half_s", [1, 15])
def test_the_reward_is_the_inverse_of_the_time_to_the_target_from_the_beginning(start_s, half_s):
    losses = [curve(start_s + i * half_s) for i in range(3)]
    to_target_s = (1 / (0.3 - 0.2) - 0.5) / 0.03
    assert reward(start_s, half_s, losses, 0.3) == pytest.approx(1 / to_target_s, rel=1e-6)
    assert 1 / to_target_s == pytest.approx(0.0031579, abs=1e-7)


@pytest.mark.parametrize(
    "losses",
    [
        (1.0, 1.1, 0.5),  # it rises
        (1.0, 0.9, 0.5),  # it falls ever faster
        (1.0, 0.75, 0.5),  # on a line
        (math.nan, 0.7, 0.5),
        (1.0, 0.7, 0.69),  # it levels out above the target
    ],
)
def test_losses_that_are_on_no_such_curve_have_the_worst_reward(losses):
    assert reward(10, 15, losses, 0.3) == INVALID


def test_implicit_momentum_falls_with_the_rate_and_is_none_alone():
    assert implicit_momentum([0.05] * 18) == pytest.approx(0.459, abs=5e-4)
    by_rate = [implicit_momentum([0.9 / c] * 18) for c in (1, 2, 5, 20)]
    assert by_rate == sorted(by_rate, reverse=True)
    assert implicit_momentum([7.0]) == 0


def search(saved=None, *, every_s=500.0, fixed=None, target=0.3):
    return RateSearch(every_s, target, 0.3, fixed, saved)


def rates(found, losses_of, periods, most=7):
    """(mode, c) of each period of 30 s, given the losses of period p at rate c in mode m."""
    seen = []
    for p in range(periods):
        seen.append((found.mode, found.c))
        losses = losses_of(p, found.mode, found.c)
        assert len(losses) == len(found.instants)
        found.end(30.0 * p, 30.0, losses, most)
    return seen


def falling(speed):
    """Losses of a trial in which training goes at this speed, and of another period."""

    def losses_of(p, mode, c):
        times = (30 * p, 30 * p + 15, 30 * p + 30) if mode == "trial" else (30 * p + 30,)
        return [curve(t, a_squared=speed(c)) for t in times]

    return losses_of


@pytest.mark.parametrize("best", [1, 2, 4])
def test_a_search_climbs_to_the_best_rate_and_keeps_it(best):
    def speed(c):
        return 0.03 - 0.002 * abs(c - best)

    seen = rates(search(), falling(speed), best + 5)
    assert seen[0] == ("warm", 1)
    assert seen[1 : best + 2] == [("trial", c) for c in range(1, best + 2)]
    assert seen[best + 2 :] == [("hold", best)] * 3


def test_a_search_stops_at_the_most_that_slow_clients_keep_up_with():
    seen = rates(search(), falling(lambda c: 0.01 * c), 6, most=3)
    assert seen[1:] == [("trial", 1), ("trial", 2), ("trial", 3), ("hold", 3), ("hold", 3)]
    assert rates(search(), falling(lambda c: 0.01 * c), 4, most=1)[1:] == [("trial", 1)] + [("hold", 1)] * 2


def test_invalid_fits_keep_the_rate():
    seen = rates(search(), lambda p, mode, c: [1.0] * (3 if mode == "trial" else 1), 4)
    assert seen == [("warm", 1), ("trial", 1), ("trial", 2), ("hold", 1)]


def test_another_search_begins_with_the_next_epoch():
    flat = rates(search(every_s=150.0), lambda p, mode, c: [1.0] * (3 if mode == "trial" else 1), 9)
    assert [p for p, (mode, c) in enumerate(flat) if (mode, c) == ("trial", 1)] == [1, 6]


@pytest.mark.parametrize(("loss", "begins"), [(1.29, False), (1.3, True), (math.nan, True)])
def test_another_search_begins_when_the_loss_has_risen(loss, begins):
    def losses_of(p, mode, c):
        return [1.0, 1.0, 1.0] if mode == "trial" else [loss if p == 4 else 1.0]

    assert (rates(search(), losses_of, 6)[5] == ("trial", 1)) is begins


def test_a_target_that_is_not_given_is_a_tenth_of_the_first_loss():
    found = search(target=None)
    assert found.instants == (0.0, 1.0)
    found.end(0.0, 30.0, [2.5, 2.0], 7)
    assert found.state()["target"] == 0.25 and found.instants == (0.0, 0.5, 1.0)


def test_a_fixed_rate_is_never_searched():
    seen = rates(search(fixed=9), lambda p, mode, c: [float(p)], 5, most=3)
    assert seen == [("hold", 9)] * 5


def test_saved_in_the_middle_of_a_search_it_goes_on():
    def speed(c):
        return 0.03 - 0.002 * abs(c - 3)

    whole = rates(search(), falling(speed), 8)
    first = search()
    before = rates(first, falling(speed), 3)
    after = rates(search(first.state()), lambda p, mode, c: falling(speed)(p + 3, mode, c), 5)
    assert before + after == whole


def test_a_trial_that_is_broken_off_begins_its_search_anew():
    found = search()
    rates(found, falling(lambda c: 0.01 * c), 3)
    assert (found.mode, found.c) == ("trial", 3)
    found.restart()
    assert (found.mode, found.c, found.state()["best"]) == ("trial", 1, None)
