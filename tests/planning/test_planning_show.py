"""Plans in words."""

from __future__ import annotations

import pytest
from small import small_plan

from edgefl.planning.show import show_plan

MODEL = {"name": "vgg", "channels": (4, 4), "pooled": (1, 2), "hidden": 16}


@pytest.mark.parametrize("method", ["edgesplit", "hsfl", "hsfl-layerwise"])
def test_cuts_and_shares(method):
    lines = show_plan(small_plan(method, 3, model=MODEL))
    assert lines[0].startswith("a round: ") and len(lines) == 4
    assert all(f"client {k} (toy): " in lines[k] and "of 4 blocks" in lines[k] for k in (1, 2, 3))


@pytest.mark.parametrize("method", ["dapple", "gpipe"])
def test_stages_and_bubbles(method):
    lines = show_plan(small_plan(method, 3, model=MODEL, stages=((2, 1), (4, 1)), train={"batch_size": 16}))
    assert lines[0].startswith("a step of 16 examples in 4 micro-batches: ")
    assert lines[1].startswith("stage 0: blocks 0 to 1, ") and "peer 0 (toy): bubble " in lines[2]
    assert lines[-1] == "without a stage: peer 2 (toy)"


def test_what_copies_of_stages_cost():
    settings = {"model": MODEL, "train": {"batch_size": 16, "momentum": 0.9}, "copy_every": 5}
    plan = small_plan("dapple", 3, stages=((2, 1), (4, 2)), **settings)
    first = plan.learner.model.stage(0, 2).counts.parameter_bytes
    assert f"copies of stages of one device: {2 * first / 1e3:.4g} kB every 5 steps" in show_plan(plan)


def test_a_method_without_a_planner_shows_nothing():
    assert show_plan(small_plan("fedavg", 2)) == []
