"""Six processes, of which two are killed and one returns: the run ends, and its model is finite."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from process_fleet import Fleet, fleet
from safetensors.torch import load_file

EXPERIMENT = """
seed = 3
[method]
name = "{method}"
[method.{method}]
{settings}
[fleet]
devices = {{ raspberry-pi-4b = {clients} }}
[network]
link = "home"
[data]
num_train = 400
num_test = 100
[model]
hidden = [16]
[train]
{work}
[execution]
emulate = true
[stop]
time_s = 25.0
"""
ROUNDS = (
    "fedavg", "fedprox", "fednova", "fedadagrad", "fedadam", "fedyogi", "median", "trimmed-mean", "krum",
    "multi-krum", "scaffold", "fjord", "adacomm", "fixed-adacomm", "fedcore", "hierarchical-fedavg",
)  # fmt: skip
NO_ROUNDS = ("fedasync", "fedbuff", "bsp", "ssp", "asyncdrop", "adsp")
SETTINGS = {
    "hierarchical-fedavg": "num_edges = 2",
    "fedbuff": "buffer_size = 3",
    "krum": "num_hostile = 0",  # four reports are left
    "multi-krum": "num_hostile = 0",
    "adacomm": "period_steps = 8\ninterval_s = 5.0",
    "fixed-adacomm": "period_steps = 5",
    "adsp": "check_period_s = 0.5",
}
WORK = {"fedcore": "local_epochs = 2"}
LOST, RETURNING = 4, 5


def totals(nodes: Fleet) -> Counter[str]:
    """The sum of each metric that was recorded, and how often it was."""
    found: Counter[str] = Counter()
    for row in nodes.rows("metrics"):
        if row["value"] not in ("", "nan"):
            found[row["name"]] += float(row["value"])
            found[f"number of {row['name']}"] += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ROUNDS + NO_ROUNDS)
def test_two_of_six_processes_are_killed_and_one_returns(method: str, tmp_path: Path) -> None:
    clients = 3 if method == "hierarchical-fedavg" else 5  # it has two edges beside them
    settings, work = SETTINGS.get(method, ""), WORK.get(method, "local_steps = 5")
    text = EXPERIMENT.format(method=method, clients=clients, settings=settings, work=work)
    with fleet(tmp_path, text, 6, state=True, grace_s=2.0) as nodes:
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
    assert found["number of train_loss"] > 20 and found["lost"] >= 1
    if method in ROUNDS:
        assert found["reports"] > 20
    if method in ROUNDS and method != "hierarchical-fedavg":  # whose edges count for themselves
        known = found["late"] + found["lost"] + found["refused"] + found["sat_out"]
        assert found["missing"] == known
    report = (tmp_path / "run" / "report.html").read_text()
    assert "gone" in report and "lost with their node" in report
