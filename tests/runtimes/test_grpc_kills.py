"""Six processes, of which two are killed and one returns: the run ends, and its model is finite."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest
import torch
from process_fleet import Fleet, fleet
from safetensors.torch import load_file

EXPERIMENT = """
seed = 3
[method]
name = "fedavg"
[fleet]
devices = { raspberry-pi-4b = 5 }
[network]
link = "home"
[data]
num_train = 400
num_test = 100
[model]
hidden = [16]
[train]
local_steps = 5
[execution]
emulate = true
[stop]
time_s = 40.0
"""
LOST, RETURNING = 4, 5


def totals(nodes: Fleet) -> Counter[str]:
    """The sum of each metric that the server has written."""
    found: Counter[str] = Counter()
    with (nodes.folder / "run" / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["node"] == "0" and row["value"] not in ("", "nan"):
                found[row["name"]] += float(row["value"])
    return found


@pytest.mark.slow
def test_two_of_six_processes_are_killed_and_one_returns(tmp_path: Path) -> None:
    with fleet(tmp_path, EXPERIMENT, 6, state=True, grace_s=2.0) as nodes:
        nodes.until_rounds_are_saved()
        nodes.kill(LOST)
        nodes.kill(RETURNING)
        nodes.start(RETURNING)
        codes = nodes.ends()
        assert codes.pop(LOST) == -9
        assert set(codes.values()) == {0}, nodes.log(0).read_text()
        assert nodes.summary["status"] in ("finished", "stopped") and nodes.summary["reason"]
        assert ("gone", str(LOST)) in nodes.events() and ("back", str(RETURNING)) in nodes.events()
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in model.values())
    found = totals(nodes)
    assert found["reports"] > 20 and found["lost"] >= 1
    assert found["missing"] == found["late"] + found["lost"] + found["refused"]
    report = (tmp_path / "run" / "report.html").read_text()
    assert "gone" in report and "lost with their node" in report
