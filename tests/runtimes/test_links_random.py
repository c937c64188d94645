"""Link models under random flows: max-min against a brute-force fluid simulation, and what always holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from link_kernel import Kernel, transfers
from toy import access

from edgefl.doctor import kernel_is_compiled
from edgefl.network import Access
from edgefl.runtimes.virtual import sharing

MODELS = ("fair", "local-fair", "fifo")


@dataclass
class Case:
    links: list[Access]
    segments: dict[str, float]
    flows: list[tuple]


def drawn(seed: int, *, cancels: bool = False) -> Case:
    """Some nodes, some of them on a segment, and flows at random times with random sizes and caps."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 7))
    segments = {"s": float(rng.uniform(20, 200))} if rng.random() < 0.5 else {}
    links = [
        access(
            float(rng.uniform(10, 100)),
            float(rng.uniform(10, 100)),
            segment="s" if segments and rng.random() < 0.6 else None,
        )
        for _ in range(n)
    ]
    flows = []
    for k in range(int(rng.integers(1, 13))):
        sender, receiver = (int(i) for i in rng.choice(n, 2, replace=False))
        start_s = float(rng.choice([0.0, rng.uniform(0, 10)]))
        cap = float(rng.uniform(5, 50)) if rng.random() < 0.3 else math.inf
        flows.append((start_s, str(k), sender, receiver, float(rng.uniform(1, 500)), {"cap": cap}))
    return Case(links, segments, flows)


def crossed(case: Case, sender: int, receiver: int) -> list[tuple[str, int]]:
    on = {case.links[sender].segment, case.links[receiver].segment} - {None}
    return [("up", sender), ("down", receiver), *(("segment", 0) for _ in on)]


def capacity(case: Case, end: tuple[str, int]) -> float:
    kind, which = end
    if kind == "segment":
        return case.segments["s"]
    return case.links[which].up_bytes_per_s if kind == "up" else case.links[which].down_bytes_per_s


def water_filling(case: Case, active: dict[str, tuple[list, float]]) -> dict[str, float]:
    """Max-min rates: freeze, one by one, whoever is first held back by a capacity or its own cap."""
    rates: dict[str, float] = {}
    while len(rates) < len(active):
        limits = {}
        for name, (ends, cap) in active.items():
            if name in rates:
                continue
            shares = [cap]
            for end in ends:
                here = [other for other, (theirs, _) in active.items() if end in theirs]
                taken = sum(rates[other] for other in here if other in rates)
                shares.append((capacity(case, end) - taken) / sum(other not in rates for other in here))
            limits[name] = min(shares)
        lowest = min(limits, key=limits.__getitem__)
        rates[lowest] = limits[lowest]
    return rates


def fluid(case: Case) -> dict[str, float]:
    """Finish times, from event to event."""
    now, finished = 0.0, {}
    coming = sorted(case.flows, key=lambda flow: flow[0])
    left: dict[str, float] = {}
    active: dict[str, tuple[list, float]] = {}
    while coming or active:
        rates = water_filling(case, active)
        ends_s = {name: now + left[name] / rates[name] for name in active}
        next_s = min([*ends_s.values(), *(coming[0][:1] if coming else ())])
        for name in active:
            left[name] -= rates[name] * (next_s - now)
        now = next_s
        for name in [name for name in active if ends_s[name] <= now * (1 + 1e-12)]:
            finished[name] = now
            del active[name], left[name]
        while coming and coming[0][0] <= now:
            _, name, sender, receiver, size, more = coming.pop(0)
            active[name], left[name] = (crossed(case, sender, receiver), more["cap"]), size
    return finished


def test_fair_is_max_min_on_two_hundred_random_sets_of_flows():
    for seed in range(200):
        case = drawn(seed)
        arrived = transfers("fair", case.links, *case.flows, segments=case.segments)
        assert arrived == pytest.approx(fluid(case), rel=1e-6), f"seed {seed}"


def even_ring(seed: int) -> Case:
    """Nodes with equal rates that send to their neighbors on a ring, at any time."""
    rng = np.random.default_rng([seed, 3])
    n, up, down = int(rng.integers(3, 9)), *(float(rate) for rate in rng.uniform(20, 60, 2))
    flows = []
    for k in range(4 * n):
        sender = int(rng.integers(n))
        receiver = (sender + int(rng.choice([-1, 1]))) % n
        flow = (float(rng.uniform(0, 20)), str(k), sender, receiver, float(rng.uniform(50, 300)))
        flows.append((*flow, {"cap": math.inf}))
    return Case([access(up, down)] * n, {}, flows)


@pytest.mark.skipif(kernel_is_compiled(), reason="a compiled function cannot be replaced")
def test_fair_asks_nobody_far_away_where_equal_shares_are_max_min(monkeypatch):
    """Mostly they are on a ring of equal nodes; where they are not, all flows around are gone through."""
    by_level, answers = sharing._by_level, []
    monkeypatch.setattr(sharing, "_by_level", lambda dirty: answers.append(by_level(dirty)) or answers[-1])
    for seed in range(60):
        case = even_ring(seed)
        arrived = transfers("fair", case.links, *case.flows)
        assert arrived == pytest.approx(fluid(case), rel=1e-6), f"seed {seed}"
    answered = sum(answer is not None for answer in answers)
    assert len(answers) / 2 < answered < len(answers)


@pytest.mark.parametrize("model", ["fair", "local-fair"])
def test_rates_stay_within_every_capacity_and_cap(model):
    checked = 0
    for seed in range(100):
        case = drawn(seed)
        kernel = Kernel(case.links, model, segments=case.segments)
        caps = {}
        for start_s, name, sender, receiver, size, more in case.flows:
            kernel.flow(start_s, name, sender, receiver, size, **more)
            caps[name] = more["cap"]
        kernel.run()
        checked += len(kernel.instants)
        for _, rates in kernel.instants:
            used: dict[tuple[str, int], float] = {}
            for flow, rate in rates:
                assert rate <= caps[flow.transfer] * (1 + 1e-9)
                for end in crossed(case, flow.lane.sender, flow.lane.receiver):
                    used[end] = used.get(end, 0.0) + rate
            for end, total in used.items():
                assert total <= capacity(case, end) * (1 + 1e-9), f"seed {seed}: {end}"
    assert checked > 800


@pytest.mark.parametrize("model", MODELS)
def test_all_that_is_sent_arrives_or_was_cancelled(model):
    """Random cancellations: what left of each flow is its size, or what its rates carried until then."""
    for seed in range(60):
        case = drawn(seed)
        kernel = Kernel(case.links, model, segments=case.segments)
        rng = np.random.default_rng([seed, 1])
        stopped = {}
        for start_s, name, sender, receiver, size, more in case.flows:
            flow = kernel.flow(start_s, name, sender, receiver, size, **more)
            if rng.random() < 0.3:
                stopped[name] = flow
                kernel.stop(start_s + float(rng.uniform(0, 5)), flow)
        arrived = kernel.run()
        for flow in kernel.flows:
            if flow.transfer in arrived:
                assert flow.remaining == 0.0
            else:
                assert flow.transfer in stopped and 0 <= flow.remaining <= flow.size_bytes
        if model == "fifo":
            by_sender: dict[int, list[str]] = {}
            for flow in sorted(kernel.flows, key=lambda f: case.flows[int(f.transfer)][0]):
                if flow.transfer in arrived:
                    by_sender.setdefault(flow.lane.sender, []).append(flow.transfer)
            left = [[name for name in kernel.left if name in names] for names in by_sender.values()]
            assert left == list(by_sender.values())
