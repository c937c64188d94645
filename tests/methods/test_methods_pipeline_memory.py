"""Pipelines where memory is short: GPipe's drains, and forward passes that are made again."""

from __future__ import annotations

import math
from typing import Any

import pytest
from split_lab import near, run
from test_methods_dapple import PLANS, device, model_of, pipeline_plan, planned, unsplit, view
from toy import Watcher

from edgefl.planning.model_costs import ModelCosts, links_of
from edgefl.planning.pipeline import simulated

ROWS = 4
"""Of a micro-batch."""
CONVOLUTIONS = {"name": "vgg", "channels": (16,) * 5, "pooled": (5,), "hidden": 16}
STAGES = ((2, 1), (3, 1), (4, 1), (7, 1))
"""Whatever precedes or follows a stage's last convolution costs next to nothing beside it, so that a backward
pass takes twice as long as a forward pass in all stages; a first block alone has no gradient at its input."""


def settings_of(**more: Any) -> dict[str, Any]:
    """16 micro-batches in four stages."""
    train = {"batch_size": 16 * ROWS, "local_steps": 1}
    return {"stages": STAGES, "micro_batches": 16, "rounds": 1, "model": CONVOLUTIONS, "train": train} | more


def bounds() -> list[tuple[int, int]]:
    ends = [end for end, _ in STAGES]
    return list(zip([0, *ends], ends, strict=False))


def equal_stages(method: str, *, room_for: int | None, **more: Any) -> tuple[Any, ModelCosts]:
    """Four stages, each on a device so fast that its two passes of a micro-batch take 3 s.

    room_for: so many micro-batches fit into memory between their passes; None: all.
    """
    common = settings_of(**more)
    free = pipeline_plan(method, profiles=[device(1e6)] * 4, **common)
    costs = ModelCosts.of(view(free), free.learner, free.config)
    profiles = []
    for s, (first, last) in enumerate(bounds()):
        seconds = costs.forward_s(first, last, s, ROWS) + costs.backward_s(first, last, s, ROWS)
        kept = costs.kept_bytes(first, last, ROWS) * (room_for or 16)
        memory = math.ceil(costs.fixed_bytes(first, last, ROWS) + kept)
        profiles.append(device(1e6 * seconds / 3, memory))
    plan = pipeline_plan(method, profiles=profiles, **common)
    return plan, ModelCosts.of(view(plan), plan.learner, plan.config)


def step_s(plan: Any) -> float:
    watcher = Watcher()
    run(plan, watcher)
    return max(time_s for _, time_s, m in watcher.metrics if "step_s" in m)


def test_equal_stages_take_what_the_schedule_says():
    """(M + S - 1) (F + B) = 57 s for both, on links that take next to nothing."""
    for method, settings in (("gpipe", {}), ("dapple", {"policy": "PA"})):
        plan, _ = equal_stages(method, room_for=None, **settings)
        assert step_s(plan) == pytest.approx(57, rel=0.03)


def test_a_memory_cap_costs_gpipe_its_drains():
    """Room for 4 of 16 micro-batches: 4 (4 + 3) 3 = 84 s against 57 s, 1.47 times, with one step each."""
    times = {}
    for method, settings in (("gpipe", {}), ("dapple", {"policy": "PA"})):
        plan, costs = equal_stages(method, room_for=4, **settings)
        found = planned(plan).plan
        assert found.warmup == ((4,) * 4 if method == "gpipe" else (4, 3, 2, 1))
        times[method] = step_s(plan)
        net = links_of(view(plan), "fifo")
        assert times[method] == pytest.approx(simulated(found, costs, net).makespan_s, rel=0.01)
    assert times["gpipe"] / times["dapple"] == pytest.approx(84 / 57, rel=0.03)


@pytest.mark.parametrize("method", ["gpipe", "dapple"])
@pytest.mark.parametrize("stages", [PLANS[3], PLANS[6]])
def test_passes_that_are_made_again_change_nothing_but_time(method, stages):
    plain, again = (pipeline_plan(method, stages=stages, recompute=flag) for flag in (False, True))
    found = run(again)
    assert near(model_of(again, found.results), unsplit(again), 1e-6)
    assert found.time_s > 1.1 * run(plain).time_s


@pytest.mark.parametrize("method", ["gpipe", "dapple"])
def test_a_step_with_passes_made_again_takes_the_planned_time(method):
    plan, costs = equal_stages(method, room_for=None, recompute=True)
    found = planned(plan)
    assert step_s(plan) == pytest.approx(found.step_s, rel=0.01)
    assert costs.backward_s(2, 3, 1, ROWS) == pytest.approx(3 * costs.forward_s(2, 3, 1, ROWS))


def test_inputs_alone_are_kept_and_more_micro_batches_fit():
    """Two stages of several blocks: what one pass keeps is there once, and the inputs of the open ones."""
    common = settings_of(stages=((4, 1), (7, 1)))
    plain = pipeline_plan("gpipe", profiles=[device(1e6)] * 4, **common)
    costs = ModelCosts.of(view(plain), plain.learner, plain.config)
    room = [costs.fixed_bytes(a, b, ROWS) + 4 * costs.kept_bytes(a, b, ROWS) for a, b in ((0, 4), (4, 7))]
    profiles = [device(1e6, math.ceil(memory)) for memory in (*room, 1, 1)]
    kept, again = (
        pipeline_plan("gpipe", profiles=profiles, recompute=flag, **common) for flag in (False, True)
    )
    costs, chunk = ModelCosts.of(view(again), again.learner, again.config), planned(again).plan.chunk
    assert planned(kept).plan.chunk == 4 < chunk
    inputs = 4 * ROWS * 16 * 8 * 8
    assert costs.kept_bytes(4, 7, ROWS) == inputs and costs.kept_bytes(0, 4, ROWS) == 4 * ROWS * 8 * 8
    block = again.learner.model.stage(4, 7)
    fixed = 4 * block.counts.parameter_bytes + ROWS * block.counts.saved_bytes
    assert costs.fixed_bytes(4, 7, ROWS) == fixed
    assert again.method.memory(again)[1] == fixed + chunk * inputs
