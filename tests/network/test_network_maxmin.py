import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.network import max_min

INF = math.inf


def test_by_hand():
    # two flows share 10; one of them is held to 1 at the second resource, by the third flow's equal share
    assert max_min([10.0, 2.0], [((0,), INF, None), ((0, 1), INF, None), ((1,), INF, None)]) == [
        9.0,
        1.0,
        1.0,
    ]
    assert max_min({7: 9.0}, [((7,), 2.0, None), ((7,), INF, None), ((7,), INF, None)]) == [2.0, 3.5, 3.5]


def test_reserved_rates_come_first():
    assert max_min([10.0], [((0,), INF, 6.0), ((0,), INF, None), ((0,), INF, None)]) == [6.0, 2.0, 2.0]


def test_overbooked_reservations_shrink_alike_and_leave_nothing():
    assert max_min([8.0], [((0,), INF, 12.0), ((0,), INF, 4.0), ((0,), INF, None)]) == [6.0, 2.0, 0.0]


def test_a_reservation_never_exceeds_the_flows_own_most():
    assert max_min([8.0], [((0,), 2.0, 6.0), ((0,), INF, None)]) == [2.0, 6.0]


def test_flows_that_cross_nothing():
    assert max_min([], [((), INF, None), ((), 5.0, None), ((), INF, 3.0)]) == [INF, 5.0, 3.0]
    assert max_min([], []) == []


def test_a_dead_link_carries_nothing():
    assert max_min([0.0, 5.0], [((0, 1), INF, None), ((1,), INF, None), ((0,), INF, 1.0)]) == [0.0, 5.0, 0.0]


def reference(capacities, flows):
    """Progressive filling in exact arithmetic: raise all open flows until somebody must stop."""
    left = [Fraction(c) for c in capacities]
    rates = [Fraction(0)] * len(flows)
    booked = [f for f, flow in enumerate(flows) if flow[2] is not None]
    wanted = [
        min(Fraction(flow[2]), Fraction(flow[1]) if flow[1] < INF else Fraction(flow[2]))
        if flow[2] is not None
        else Fraction(0)
        for flow in flows
    ]
    for f in booked:
        factor = Fraction(1)
        for r in flows[f][0]:
            total = sum(wanted[g] for g in booked if r in flows[g][0])
            factor = min(factor, left[r] / total if total > 0 else Fraction(1))
        rates[f] = wanted[f] * factor
    for r in range(len(left)):
        left[r] -= sum(rates[f] for f in booked if r in flows[f][0])
    open_flows = {f for f, flow in enumerate(flows) if flow[2] is None}
    while open_flows:
        steps = [left[r] / n for r in range(len(left)) if (n := sum(r in flows[f][0] for f in open_flows))]
        steps += [Fraction(flows[f][1]) - rates[f] for f in open_flows if flows[f][1] < INF]
        step = min(steps)
        for f in open_flows:
            rates[f] += step
            for r in flows[f][0]:
                left[r] -= step
        open_flows = {
            f for f in open_flows if rates[f] != flows[f][1] and all(left[r] > 0 for r in flows[f][0])
        }
    return [float(rate) for rate in rates]


@st.composite
def networks(draw):
    numbers = st.integers(0, 40).map(float) | st.floats(0.5, 1e6, allow_subnormal=False)
    capacities = draw(st.lists(numbers, min_size=1, max_size=7))
    crossed = st.sets(st.integers(0, len(capacities) - 1), min_size=1, max_size=4).map(tuple)
    flow = st.tuples(crossed, st.just(INF) | numbers, st.none() | st.none() | numbers)
    return capacities, draw(st.lists(flow, max_size=12))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(networks())
def test_equals_exact_progressive_filling(network):
    capacities, flows = network
    assert max_min(capacities, flows) == pytest.approx(reference(capacities, flows), rel=1e-9, abs=1e-6)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(networks())
def test_no_resource_is_overfull_and_every_flow_has_a_reason_to_stop(network):
    capacities, flows = network
    rates = max_min(capacities, flows)
    used = [sum(rates[f] for f, flow in enumerate(flows) if r in flow[0]) for r in range(len(capacities))]
    assert all(u <= c * (1 + 1e-9) + 1e-6 for u, c in zip(used, capacities, strict=True))
    for f, (crossed, cap, reserved) in enumerate(flows):
        if reserved is None and rates[f] < cap:
            sharers = [
                max(rates[g] for g, flow in enumerate(flows) if r in flow[0] and flow[2] is None)
                for r in crossed
                if used[r] >= capacities[r] * (1 - 1e-9) - 1e-6
            ]
            assert any(rates[f] >= most * (1 - 1e-9) - 1e-6 for most in sharers)
