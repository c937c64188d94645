"""The three link models: small cases by hand, and max-min against a fluid simulation by brute force."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from toy import access, run_toy

from edgefl.errors import EdgeflError
from edgefl.network import Access, NetworkPlan, Topology
from edgefl.nodes import Message
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.runtimes.virtual import sharing
from edgefl.runtimes.virtual.links import Flow, Lane, make_links

MODELS = ("fair", "local-fair", "fifo")


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
        lane = Lane(sender, receiver, Message, cap, [0, 0, 0], ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)), 1.0, None)
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


FOUR = [access(100.0)] * 4


@pytest.mark.parametrize("model", MODELS)
def test_one_flow_takes_its_size_over_the_smaller_rate(model):
    links = [access(100.0, 50.0), access(40.0, 80.0)]
    assert transfers(model, links, (0, "a", 0, 1, 200))["a"] == pytest.approx(2.5)
    assert transfers(model, links, (1, "a", 1, 0, 200))["a"] == pytest.approx(6.0)


@pytest.mark.parametrize("model", ["fair", "local-fair"])
def test_two_flows_share_an_uplink(model):
    """Both at 50 until the short one ends at 2 s; the long one then has all 100 for its last 200."""
    arrived = transfers(model, FOUR, (0, "long", 0, 1, 300), (0, "short", 0, 2, 100))
    assert arrived == pytest.approx({"short": 2.0, "long": 4.0})


@pytest.mark.parametrize("model", ["fair", "local-fair"])
def test_a_flow_that_comes_later_takes_its_share_from_then_on(model):
    arrived = transfers(model, FOUR, (0, "a", 0, 1, 300), (1, "b", 0, 2, 100))
    assert arrived == pytest.approx({"b": 3.0, "a": 4.0})


@pytest.mark.parametrize("model", ["fair", "local-fair"])
def test_fan_in_shares_the_downlink(model):
    flows = [(0, str(i), i, 0, 100) for i in (1, 2, 3)]
    assert transfers(model, FOUR, *flows) == pytest.approx({"1": 3.0, "2": 3.0, "3": 3.0})


def test_what_a_flow_leaves_goes_to_others_in_fair_only():
    """0 -> 1 and 0 -> 2, where 2 takes 20 only: fair gives the other 80, local-fair 50."""
    links = [access(100.0), access(100.0), access(100.0, 20.0)]
    flows = [(0, "fast", 0, 1, 400), (0, "slow", 0, 2, 400)]
    assert transfers("fair", links, *flows) == pytest.approx({"fast": 5.0, "slow": 20.0})
    assert transfers("local-fair", links, *flows) == pytest.approx({"fast": 8.0, "slow": 20.0})


def test_a_cap_bounds_one_flow():
    flows = [(0, "capped", 0, 1, 100, {"cap": 10.0}), (0, "free", 0, 2, 180)]
    assert transfers("fair", FOUR, *flows) == pytest.approx({"free": 2.0, "capped": 10.0})
    assert transfers("fifo", FOUR, *flows) == pytest.approx({"capped": 10.0, "free": 11.8})


def test_a_reserved_rate_is_kept_and_the_others_share_the_rest():
    flows = [(0, "kept", 0, 1, 60, {"reserved": 30.0}), (0, "a", 0, 2, 70), (0, "b", 0, 3, 70)]
    for model in ("fair", "local-fair"):
        assert transfers(model, FOUR, *flows) == pytest.approx({"kept": 2.0, "a": 2.0, "b": 2.0})
    assert transfers("fifo", FOUR, *flows) == pytest.approx({"kept": 2.0, "a": 1.0, "b": 2.0})


@pytest.mark.parametrize("model", ["fair", "local-fair"])
def test_overbooked_reservations_shrink_alike(model):
    flows = [(0, "a", 0, 1, 80, {"reserved": 120.0}), (0, "b", 0, 2, 40, {"reserved": 60.0})]
    arrived = transfers(model, FOUR, *flows)
    assert arrived["a"] == pytest.approx(1.2, rel=1e-6) and arrived["b"] == pytest.approx(1.2, rel=1e-6)


@pytest.mark.parametrize("model", ["fair", "local-fair"])
def test_a_segment_is_shared_by_all_that_cross_it_and_counts_once(model):
    links = [access(100.0, segment="wifi")] * 2 + [access(100.0)] * 2
    inside = (0, "inside", 0, 1, 60)
    outward = (0, "outward", 1, 2, 60)
    past = (0, "past", 3, 2, 60)
    segments = {"wifi": 60.0}
    assert transfers(model, links, inside, segments=segments) == pytest.approx({"inside": 1.0})
    arrived = transfers(model, links, inside, outward, past, segments=segments)
    assert arrived["inside"] == pytest.approx(2.0) and arrived["outward"] == pytest.approx(2.0)
    assert arrived["past"] == pytest.approx(60 / 70 if model == "fair" else 1.2)


def test_fifo_sends_one_after_the_other():
    arrived = transfers("fifo", FOUR, (0, "a", 0, 1, 100), (0, "b", 0, 2, 50), (0.2, "c", 0, 1, 50))
    assert arrived == pytest.approx({"a": 1.0, "b": 1.5, "c": 2.0})


def test_fifo_passes_a_downlink_as_it_comes_in_and_waits_while_that_is_busy():
    flows = [(0, "a", 1, 0, 100), (0, "b", 2, 0, 100), (5, "c", 3, 0, 100)]
    assert transfers("fifo", FOUR, *flows) == pytest.approx({"a": 1.0, "b": 2.0, "c": 6.0})


def test_fifo_goes_on_with_the_next_when_the_first_is_cancelled():
    kernel = Kernel(FOUR, "fifo")
    first, _, third = (kernel.flow(0, name, 0, 1, 100) for name in ("a", "b", "c"))
    kernel.stop(0.25, first)
    kernel.stop(0.5, third)
    assert kernel.run() == pytest.approx({"b": 1.25})
    assert (first.remaining, third.remaining) == (75.0, 100.0)


@pytest.mark.parametrize("model", ["fair", "local-fair"])
def test_a_cancelled_flow_frees_its_share_and_knows_what_left(model):
    kernel = Kernel(FOUR, model)
    kernel.flow(0, "kept", 0, 1, 200)
    cancelled = kernel.flow(0, "cancelled", 0, 2, 500)
    kernel.stop(1.0, cancelled)
    assert kernel.run() == pytest.approx({"kept": 2.5})
    assert cancelled.remaining == pytest.approx(450.0)


# --- random flows ------------------------------------------------------------------------------------


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


@pytest.mark.skipif(not sharing.__file__.endswith(".py"), reason="a compiled function cannot be replaced")
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


# --- in the runtime --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load(Message):
    max_size = {"values": 1_000_000}
    values: torch.Tensor


@pytest.mark.parametrize("model", MODELS)
def test_a_cancelled_transfer_is_charged_what_has_left(model):
    """Of 1 MB at 1 MB/s a quarter leaves; of the one behind it, on the same link and of one kind, nothing."""

    async def sender(node):
        first, second = node.send(1, Load(torch.zeros(250_000))), node.send(1, Load(torch.zeros(250_000)))
        await node.sleep(0.25)
        second.cancel()
        first.cancel()
        with pytest.raises(EdgeflError, match="cancelled"):
            await first.delivered
        await node.sleep(5.0)

    async def receiver(node):
        return await node.receive(Load, timeout_s=4.0)

    outcome = run_toy([sender, receiver], (Load,), access=access(1e6), link_model=model)
    assert outcome.results[1] is None
    messages, payload, encoded = outcome.traffic.table[0, 1, "Load"]
    assert messages == 1 and payload == pytest.approx(250_000, rel=1e-3)
    assert encoded == pytest.approx(250_000, abs=2)
    assert outcome.traffic.sent_bytes[0] == outcome.traffic.received_bytes[1] == encoded


@pytest.mark.parametrize("model", MODELS)
def test_a_crash_is_charged_what_had_left(model):
    async def sender(node):
        node.send([1, 2], Load(torch.zeros(250_000)))
        await node.sleep(100.0)

    async def receiver(node):
        return await node.receive(Load, timeout_s=4.0)

    faults = FaultPlan(crashes=(Crash(0, at_s=0.5),))
    outcome = run_toy(
        [sender, receiver, receiver],
        (Load,),
        access=access(1e6),
        link_model=model,
        faults=faults,
        ends_with=[1, 2],
    )
    assert outcome.results == {1: None, 2: None}
    assert outcome.traffic.sent_bytes[0] == pytest.approx(500_000, rel=1e-3)


@pytest.mark.parametrize("model", ["fair", "local-fair"])
def test_a_hub_gives_each_flow_the_same_as_going_through_all_of_them(model, monkeypatch):
    """Stars of many flows, some with caps and thin ends, some crowded or withdrawn on the way."""
    hubs = 0
    for seed in range(120):
        rng = np.random.default_rng([seed, 2])
        links = [access(float(rng.uniform(20, 200)), float(rng.uniform(2, 60))) for _ in range(14)]
        flows = []
        for k in range(int(rng.integers(8, 40))):
            center_sends = rng.random() < 0.8
            other = int(rng.integers(1, 14)) if rng.random() < 0.3 else 1 + k % 13
            cap = float(rng.uniform(1, 20)) if rng.random() < 0.3 else math.inf
            ends = (0, other) if center_sends else (other, 0)
            flows.append((float(rng.integers(0, 6)), str(k), *ends, int(rng.integers(1, 400)), cap))
        withdrawn = rng.choice(len(flows), 3, replace=False)
        found = []
        for least in (2, 10**9):
            monkeypatch.setattr(sharing, "_LEAST_HUB", least)
            kernel = Kernel(links, model)
            for at, (start_s, name, sender, receiver, size, cap) in enumerate(flows):
                flow = kernel.flow(start_s, name, sender, receiver, size, cap=cap)
                if at in withdrawn:
                    kernel.stop(start_s + 1.5, flow)
            arrived = kernel.run()
            found.append((arrived, {f.transfer: f.remaining for f in kernel.flows}))
            hubs += kernel.links.numbered if least == 2 else 0
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
        assert found[0][1] == pytest.approx(found[1][1], rel=1e-9, abs=1e-6)
    assert hubs > 2000
