"""Pipelines: schedules by hand, the latency model, and the planner against trying all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from small import small_plan
from toy import PROFILE, Watcher

from edgefl.learning.executors import make_executor
from edgefl.planning import dapple, fleet
from edgefl.planning.dapple import NoPlan, fits, plan_pipeline, shapes, with_policy
from edgefl.planning.pipeline import (
    PipelinePlan,
    Stage,
    early_backward_order,
    gpipe_order,
    instructions,
    latency_s,
    longest_stage_s,
    overlaps,
    row_bounds,
    simulated,
)
from edgefl.planning.simulate import Compute, Links, Receive, Send, simulate
from edgefl.runtimes.virtual import VirtualRuntime


@dataclass
class Table:
    """Costs by layer for a whole micro-batch of `rows` examples at speed 1."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    parameters: tuple[float, ...]
    cut: tuple[float, ...]
    rows: int
    speeds: dict[int, float]
    memory: float = 1e18
    kept: float = 1.0

    @property
    def num_layers(self):
        return len(self.forward)

    def forward_s(self, first, last, device, rows):
        return sum(self.forward[first:last]) * rows / self.rows / self.speeds[device]

    def backward_s(self, first, last, device, rows):
        return sum(self.backward[first:last]) * rows / self.rows / self.speeds[device]

    def cut_bytes(self, layer, rows):
        return self.cut[layer - 1] * rows / self.rows

    def parameter_bytes(self, first, last):
        return sum(self.parameters[first:last])

    def fixed_bytes(self, first, last, rows):
        return 0.0

    def kept_bytes(self, first, last, rows):
        return self.kept * rows / self.rows

    def memory_bytes(self, device):
        return self.memory

    def speed(self, device):
        return self.speeds[device]


def links(n, rate=1e18, model="separate", latency_s=0.0):
    every = dict.fromkeys(range(n), rate)
    return Links(every, every, dict.fromkeys(range(n), latency_s), dict.fromkeys(range(n), 1e18), model)


def straight(S=4, M=16, C=0.0, rate=1e6, **more):
    """S equal stages on S devices, F = 1, B = 2, C seconds per transfer (headers apart)."""
    cut = (C * rate - 195,) * (S - 1) if C else (0.0,) * (S - 1)
    costs = Table((1.0,) * S, (2.0,) * S, (0.0,) * S, cut, 60, dict.fromkeys(range(S), 1.0), **more)
    stages = tuple(Stage(s, s + 1, (s,), (1.0,)) for s in range(S))
    return PipelinePlan(stages, 60 * M, M, "PA", ()), costs


def step_s(policy, C=0.0, model="separate", S=4, M=16, **more):
    plan, costs = straight(S, M, C, **more)
    rate = 1e6 if C else 1e18
    return simulated(with_policy(plan, costs, policy), costs, links(S, rate, model)).makespan_s


def test_orders_by_hand():
    F, B = "F", "B"
    assert early_backward_order(4, 2) == [(F, 0), (F, 1), (B, 0), (F, 2), (B, 1), (F, 3), (B, 2), (B, 3)]
    assert early_backward_order(2, 5) == [(F, 0), (F, 1), (B, 0), (B, 1)]
    assert gpipe_order(3, 2) == [(F, 0), (F, 1), (B, 1), (B, 0), (F, 2), (B, 2)]


def test_equal_stages_on_a_free_network():
    for policy in ("PA", "gpipe"):
        assert step_s(policy) == pytest.approx((16 + 4 - 1) * 3, abs=1e-9)
    assert step_s("gpipe", S=1) == pytest.approx(48) and step_s("PA", M=1) == pytest.approx(12)


@pytest.mark.parametrize("model", ["separate", "fifo"])
@pytest.mark.parametrize(
    ("C", "expected"),
    [(0.1, (59.8, 57.6, 57.6)), (0.5, (71, 60, 60)), (1, (85, 63, 63))],
)
def test_transfers_beside_computing(model, C, expected):
    found = tuple(step_s(policy, C, model) for policy in ("PA", "PB", "gpipe"))
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("model", "expected"), [("separate", (99, 66, 73.5)), ("fifo", (99.5, 68.5, 73.5))])
def test_long_transfers_part_the_two_kinds_of_links(model, expected):
    """One uplink per node, first in, first out, and downlinks that hold nothing up."""
    plan, costs = straight(C=1.5)
    net = links(4, 1e6, model)
    if model == "fifo":
        net = replace(net, down=dict.fromkeys(range(4), 1e18))
    found = tuple(
        simulated(with_policy(plan, costs, policy), costs, net).makespan_s for policy in ("PA", "PB", "gpipe")
    )
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_cap_of_four_micro_batches_in_memory():
    common = {"memory": 4.0, "kept": 1.0}
    assert step_s("gpipe", **common) == pytest.approx(84)
    assert step_s("PA", **common) == pytest.approx(57)
    assert step_s("gpipe", **common) / step_s("PA", **common) == pytest.approx(1.4737, abs=1e-3)


def test_warm_up_depths_are_the_peaks_in_memory():
    plan, costs = straight()
    for policy, expected in (("PA", (4, 3, 2, 1)), ("PB", (7, 5, 3, 1)), ("gpipe", (16, 16, 16, 16))):
        chosen = with_policy(plan, costs, policy)
        assert chosen.warmup == expected
        for s in range(4):
            open_ones = np.cumsum([1 if kind == "F" else -1 for kind, _ in chosen.order(s)])
            assert open_ones.max() == expected[s] and open_ones[-1] == 0


def chain(forward, backward, M=8):
    S = len(forward)
    costs = Table(forward, backward, (0.0,) * S, (0.0,) * (S - 1), 60, dict.fromkeys(range(S), 1.0))
    plan = PipelinePlan(tuple(Stage(s, s + 1, (s,), (1.0,)) for s in range(S)), 60 * M, M, "PA", ())
    plan = with_policy(plan, costs, "PA")
    return latency_s(plan, costs, links(S)), simulated(plan, costs, links(S)).makespan_s


def test_the_latency_model_by_hand():
    assert chain((1, 2, 1), (2, 4, 2)) == pytest.approx((51, 52))
    assert chain((2, 1, 1), (4, 2, 2)) == pytest.approx((48, 50))
    assert chain((1, 1, 3, 1), (2, 2, 6, 2), 12) == pytest.approx((114, 114))


def test_the_latency_model_is_an_estimate_from_below_where_transfers_are_free():
    rng, ratios = np.random.default_rng(0), []
    for _ in range(300):
        S = int(rng.integers(2, 5))
        forward = tuple(rng.uniform(0.5, 2, S))
        L, real = chain(forward, tuple(2 * f for f in forward), int(rng.integers(8, 17)))
        ratios.append(L / real)
    assert max(ratios) <= 1 + 1e-9 and min(ratios) >= 0.8 and np.median(ratios) >= 0.96


def random_table(seed, layers, devices, equal=True):
    rng = np.random.default_rng(seed)
    forward = rng.uniform(0.5, 2, layers)
    speeds = np.ones(devices) if equal else rng.uniform(0.5, 3, devices)
    return Table(
        tuple(forward),
        tuple(2 * forward),
        tuple(rng.uniform(0, 40, layers)),
        tuple(rng.uniform(0, 0.5, layers - 1)),
        12,
        dict(enumerate(speeds)),
    )


@pytest.mark.parametrize("seed", range(6))
def test_on_small_cases_the_plan_is_the_best_of_all(seed):
    layers, devices, M = 3 + seed % 3, 4, 6
    costs = random_table(seed, layers, devices, equal=seed % 2 == 0)
    net = links(devices, rate=10.0)
    found = plan_pipeline(costs, net, range(devices), 12 * M, M)
    everything = [
        simulated(with_policy(p, costs, policy), costs, net).makespan_s
        for p in shapes(costs, range(devices), 12 * M, M, net)
        for policy in ("PA", "PB")
    ]
    assert found.step_s == min(everything)


def test_all_plans_are_counted():
    """C(N + G - 1, G - 1) ways to cut N layers into stages on at most G devices."""
    costs = random_table(0, 4, 3)
    assert len(list(dapple.all_bounds(4, 3))) == math.comb(4 + 3 - 1, 3 - 1)
    assert len(list(dapple.all_bounds(12, 8))) == 50_388
    kept = list(shapes(costs, range(3), 12 * 2, 2, links(3)))
    assert len({plan.stages for plan in kept}) == len(kept)


def vgg_like(p):
    """F = 1, 1, 1, 0.2, B = 2 F, 0.05 s a cut, all-reduce seconds by layer 2 (g - 1) / g times 0.1, .., p."""
    rate = 1e9
    forward = (1.0, 1.0, 1.0, 0.2)
    parameters = tuple(s * rate for s in ((0.1, 0.1, 0.1, p) if p is not None else (0, 0, 0, 0)))
    cut = (0.05 * rate,) * 3
    return Table(
        forward, tuple(2 * f for f in forward), parameters, cut, 12, dict.fromkeys(range(4), 1.0)
    ), rate


@pytest.mark.parametrize(
    ("p", "best", "replicated"),
    [
        (50.0, (48.4, ((3, 3), (4, 1))), 113.9),
        (5.0, (46.4, ((4, 4),)), 46.4),
        (None, (38.4, ((4, 4),)), 38.4),
    ],
)
def test_a_last_layer_with_many_parameters_is_cut_off_and_small_ones_are_replicated(p, best, replicated):
    costs, rate = vgg_like(p)
    net = links(4, rate)
    candidates = [(latency_s(plan, costs, net), plan) for plan in shapes(costs, range(4), 12 * 16, 16, net)]
    L, plan = min(candidates, key=lambda row: row[0])
    shape = tuple((s.last, len(s.devices)) for s in plan.stages)
    assert (round(L, 1), shape) == best
    (whole,) = [L for L, plan in candidates if len(plan.stages) == 1 and len(plan.stages[0].devices) == 4]
    assert whole == pytest.approx(replicated, abs=0.06)


def test_rows_go_by_speed_and_all_are_covered():
    assert row_bounds(10, (1.0, 1.0, 1.0)) == ((0, 4), (4, 7), (7, 10))
    assert (
        row_bounds(2, (5.0, 1.0, 1.0))[0] == (0, 2)
        or sum(b - a for a, b in row_bounds(2, (5.0, 1.0, 1.0))) == 2
    )
    for size in range(1, 20):
        upper, lower = row_bounds(size, (1.0, 3.0)), row_bounds(size, (2.0, 1.0, 1.0))
        shared = overlaps(upper, lower)
        assert sum(end - begin for _, _, begin, end in shared) == size
        if size >= 3:
            assert min(b - a for a, b in lower) >= 1


def test_too_little_memory_is_no_plan():
    _, costs = straight(memory=0.5, kept=1.0)
    with pytest.raises(NoPlan):
        plan_pipeline(costs, links(2), [0], 60, 1)
    # Replicas share the rows: four devices hold what one cannot.
    plan = plan_pipeline(costs, links(4), range(4), 60, 1).plan
    assert fits(plan, costs) and all(len(stage.devices) >= 2 for stage in plan.stages)


def test_a_large_fleet_is_planned_from_families():
    costs = random_table(1, 16, 10)
    found = plan_pipeline(costs, links(10, 10.0), range(10), 12 * 4, 4)
    alone = simulated(
        with_policy(PipelinePlan((Stage(0, 16, (0,), (1.0,)),), 48, 4, "PA", ()), costs, "PA"),
        costs,
        links(10),
    )
    assert found.step_s < alone.makespan_s


def test_fair_links_share_an_uplink():
    """Two messages at once at half the rate each; then the rest of the longer one alone."""
    programs = {
        0: [Send(1, "a", 10.0, "F"), Send(2, "b", 30.0, "B")],
        1: [Receive(0, "a")],
        2: [Receive(0, "b")],
    }
    run = simulate(programs, links(3, 10.0, "fair", latency_s=0.25))
    assert run.ends_s[1] == pytest.approx(2.0 + 0.5) and run.ends_s[2] == pytest.approx(4.0 + 0.5)


def test_a_schedule_that_never_ends_is_refused_and_bubbles_are_told():
    with pytest.raises(ValueError, match="never ends"):
        simulate({0: [Receive(1, "x")], 1: []}, links(2))
    run = simulate({0: [Compute(3.0)], 1: [Compute(1.0)]}, links(2))
    assert run.makespan_s == 3 and run.bubble(1) == pytest.approx(2 / 3)
    plan, costs = straight()
    lists = instructions(with_policy(plan, costs, "PA"), costs)
    whole = simulate(lists, links(4))
    assert whole.bubble(0) == pytest.approx(3 / 19)  # (S - 1) / (M + S - 1)


@pytest.mark.parametrize("seed", range(6))
def test_a_balanced_plan_has_the_shortest_longest_stage_and_no_faster_step(seed):
    costs, net, M = random_table(seed, 5, 4, equal=seed % 2 == 0), links(4, rate=10.0), 6
    found = plan_pipeline(costs, net, range(4), 12 * M, M, balanced=True)
    best = plan_pipeline(costs, net, range(4), 12 * M, M)
    longest = [longest_stage_s(p, costs, net) for p in shapes(costs, range(4), 12 * M, M, net)]
    assert longest_stage_s(found.plan, costs, net) == min(longest)
    assert best.step_s <= found.step_s
    assert longest_stage_s(best.plan, costs, net) >= min(longest)


def test_the_longest_stage_by_hand():
    """Four stages of 3 s, 0.5 s each way between them; an all-reduce of 90 s over 16 micro-batches."""
    plan, costs = straight(C=0.5)
    assert longest_stage_s(with_policy(plan, costs, "PA"), costs, links(4, 1e6)) == pytest.approx(3)
    costs.cut = (2e6,) * 3
    assert longest_stage_s(plan, costs, links(4, 1e6)) == pytest.approx(4)
    alone = Table((1.0,), (2.0,), (90.0,), (), 60, {0: 1.0, 1: 1.0})
    both = PipelinePlan((Stage(0, 1, (0, 1), (1.0, 1.0)),), 60 * 16, 16, "PA", ())
    assert longest_stage_s(both, alone, links(2, 1.0)) == pytest.approx(90 / 16)


def test_a_fleet_is_planned_once_for_all_that_ask(monkeypatch):
    """What refuses, what needs memory, and the leader go by one plan; another plan is not taken for it."""
    asked = []
    find = fleet.plan_pipeline
    monkeypatch.setattr(fleet, "plan_pipeline", lambda *args, **kw: asked.append(args) or find(*args, **kw))
    plan = small_plan("dapple", 3, rounds=1, model={"hidden": (16, 8)})
    plan.method.prepare(plan)
    assert plan.method.memory(plan)
    assert VirtualRuntime(plan, Watcher(), make_executor("inline", plan.learner)).run().status == "finished"
    assert len(asked) == 1
    slow = PROFILE.model_copy(update={"compute_flops": 1e6})
    slower = replace(plan, nodes=tuple(replace(spec, profile=slow) for spec in plan.nodes))
    slower.method.prepare(slower)
    assert len(asked) == 2
