"""Peers over gRPC, a process each: one is killed and started again, and takes part to the end."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from process_fleet import Fleet, fleet
from safetensors.torch import load_file

EXPERIMENT = """
seed = 3
[method]
name = "{method}"
[fleet]
devices = {{ raspberry-pi-4b = 5 }}
[network]
topology = "ring"
link = "home"
{more}
[data]
num_train = 400
num_test = 100
[model]
hidden = [16]
[train]
local_steps = 1
[execution]
emulate = true
[stop]
time_s = 30.0
"""
VICTIM, NEIGHBOR = 3, 2


def rounds_of(nodes: Fleet, node: int) -> dict[int, float]:
    """When a node had made each of its rounds, as far as the process with node 0 was told."""
    rows = [r for r in nodes.rows("metrics") if r["name"] == "round" and r["node"] == str(node)]
    return {int(float(r["value"])): float(r["time_s"]) for r in rows}


def came_back(nodes: Fleet) -> tuple[bool, float]:
    """Whether it was missed, and when it was back."""
    events = {r["kind"]: float(r["time_s"]) for r in nodes.rows("events") if r["node"] == str(VICTIM)}
    return "gone" in events, events["back"]


@pytest.mark.slow
@pytest.mark.parametrize("missed", [True, False])
@pytest.mark.parametrize(
    ("method", "more"),
    [("d-psgd", ""), ("choco-sgd", '[compress]\nname = "top-k"\nfraction = 0.1')],
)
def test_a_neighbor_that_is_killed_and_started_again_keeps_step_with_the_others(
    method: str, more: str, missed: bool, tmp_path: Path
) -> None:
    """On a ring: nobody waits for who is missed; from a round on that they agree on it takes part again."""
    text = EXPERIMENT.format(method=method, more=more)
    with fleet(tmp_path, text, 5, state=True, grace_s=4.0 if missed else 120.0) as nodes:
        nodes.until_rounds_are_saved()
        nodes.kill(VICTIM)
        if missed:
            nodes.until(f"process {VICTIM} .* stayed away", NEIGHBOR)
        nodes.start(VICTIM)
        assert nodes.ends() == dict.fromkeys(range(5), 0), nodes.log(VICTIM).read_text()
        was_missed, back_s = came_back(nodes)
        assert was_missed == missed
        after = {k: at_s for k, at_s in rounds_of(nodes, VICTIM).items() if at_s > back_s}
        others = rounds_of(nodes, NEIGHBOR)
        last = max(others)
        assert sorted(after) == list(range(min(after), max(after) + 1))  # without a gap
        assert max(after) >= last - 2 and min(after) <= last - 20
        apart_s = sorted(at_s - others[k] for k, at_s in after.items() if k in others)  # as their clocks are
        assert apart_s[len(apart_s) * 19 // 20] - apart_s[len(apart_s) // 20] < 1.0
        assert math.isfinite(float(str(nodes.summary["final_loss"])))
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in model.values())
