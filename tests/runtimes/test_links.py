"""The three link models: small cases by hand, and in the runtime."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from link_kernel import Kernel, transfers
from toy import access, run_toy

from edgefl.errors import EdgeflError
from edgefl.nodes import Message
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.runtimes.virtual import sharing

MODELS = ("fair", "local-fair", "fifo")


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
