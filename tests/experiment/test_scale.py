"""Claims that take a while: large fleets, a busy machine, and the quickstart's accuracy."""

from __future__ import annotations

import multiprocessing
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from edgefl.experiment.config import load_experiment
from edgefl.experiment.runner import run_experiment

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "experiments" / "quickstart.toml"
GOSSIP = """
name = "many"
[method]
name = "d-psgd"
[fleet]
devices = { raspberry-pi-4b = %d }
[network]
link = "home"
link_model = "local-fair"
topology = { name = "random-regular", degree = 4 }
[data]
name = "digits"
partition = { name = "iid", allow_reuse = true }
[model]
name = "mlp"
[train]
local_steps = 1
[evaluate]
max_nodes = 20
[stop]
rounds = %d
"""


def _in_a_process(file: Path, out: Path) -> int:
    """Run a file by the command line; returns the most memory that it took, in bytes."""
    command = [
        sys.executable,
        "-c",
        "from edgefl.cli import main; main()",
        "run",
        str(file),
        "--out",
        str(out),
    ]
    subprocess.run([*command, "--quiet"], check=True, stdout=subprocess.DEVNULL, timeout=550)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


@pytest.mark.parametrize(("nodes", "rounds"), [(1_000, 10), (10_000, 3)])
def test_a_large_fleet_gossips_and_finishes_in_four_gibibytes(tmp_path, nodes, rounds):
    file = tmp_path / "many.toml"
    file.write_text(GOSSIP % (nodes, rounds))
    memory = _in_a_process(file, tmp_path / "out")
    assert memory < 4 << 30
    assert '"status": "finished"' in (tmp_path / "out" / "run.json").read_text()


def _spin(_: int) -> None:
    while True:
        pass


def test_a_busy_machine_changes_no_byte(tmp_path):
    experiment = load_experiment(QUICKSTART, smoke=True)
    quiet = run_experiment(experiment, out=tmp_path / "quiet")
    context = multiprocessing.get_context("spawn")
    load = [context.Process(target=_spin, args=(i,), daemon=True) for i in range(2)]
    for process in load:
        process.start()
    try:
        busy = run_experiment(experiment, out=tmp_path / "busy")
    finally:
        for process in load:
            process.kill()
            process.join()
    for name in (
        "metrics.csv",
        "curve.csv",
        "evaluations.csv",
        "spans.csv",
        "traffic.csv",
        "model.safetensors",
    ):
        assert (quiet.folder / name).read_bytes() == (busy.folder / name).read_bytes(), name


def test_fedavg_on_twenty_devices_reaches_ninety_per_cent(tmp_path):
    devices = "fleet.devices={raspberry-pi-4b=10, jetson-nano=5, jetson-orin-nano=3, laptop-old=2}"
    result = run_experiment(load_experiment(QUICKSTART, [devices]), out=tmp_path / "run")
    assert result.summary["final_accuracy"] >= 0.9
    assert result.summary["time_to_target_s"] is not None
