"""`edgefl node`: real processes that are started, ended, killed and started again."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from process_fleet import fleet

from edgefl.errors import ConfigError
from edgefl.experiment.config import load_experiment
from edgefl.experiment.local import run_node
from edgefl.experiment.runner import run_experiment
from edgefl.runtimes.grpc.local import free_addresses
from edgefl.runtimes.grpc.place import FleetFile
from edgefl.runtimes.grpc.probe import probe

EXPERIMENT = """
seed = 3
[method]
name = "fedavg"
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
local_steps = 5
[execution]
emulate = true
[stop]
rounds = {rounds}
"""


@pytest.mark.slow
def test_a_client_that_is_told_to_end_leaves_and_the_run_goes_on(tmp_path: Path) -> None:
    with fleet(tmp_path, EXPERIMENT.format(clients=2, rounds=25), 3) as nodes:
        nodes.until("connected to process 2", 0)
        assert probe(nodes.addresses[1]) == "SERVING"
        time.sleep(0.5)
        nodes.processes[2].send_signal(signal.SIGTERM)
        assert nodes.ends() == {0: 0, 1: 0, 2: 130}
        assert (nodes.summary["status"], nodes.summary["nodes"]) == ("finished", 3)
        assert nodes.events() == [("gone", "2")]
        assert (tmp_path / "run" / "report.html").exists()
        assert not list(tmp_path.glob("state*"))


def test_refusals_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(EXPERIMENT.format(clients=2, rounds=1))
    file, addresses = tmp_path / "fleet.toml", free_addresses(2)

    def refused(match: str, nodes_of: tuple[tuple[int, ...], ...], node: int, **options: Path) -> None:
        file.write_text(FleetFile("fleet", Path("experiment.toml"), addresses, nodes_of).to_toml())
        with pytest.raises(ConfigError, match=match):
            run_node(file, node, **options)

    refused(r"--id = 3: the fleet file has nodes 0 to 2", ((0,), (1, 2)), 3)
    refused(r"'4 nodes': the experiment has 3", ((0,), (1, 2, 3)), 0)
    refused(r"one node per process; this one hosts \[1, 2\]", ((0,), (1, 2)), 1, state=tmp_path / "state")
    refused(r"the process with node 0 alone writes a folder", ((0,), (1, 2)), 1, out=tmp_path / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"experiment.toml", "fleet.toml"}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_and_started_again_it_ends_as_if_undisturbed(victim: int, tmp_path: Path) -> None:
    """The server goes on from its saved round; a client is sent again what it had not answered."""
    with fleet(tmp_path, EXPERIMENT.format(clients=4, rounds=40), 5, state=True) as nodes:
        nodes.until_rounds_are_saved()
        time.sleep(1.0)
        nodes.kill(victim)
        time.sleep(0.5)
        nodes.start(victim)
        nodes.until(f"node {victim} is back, life 1", victim)
        assert nodes.ends() == dict.fromkeys(range(5), 0)
        assert nodes.events() == [("crash", str(victim)), ("back", str(victim))]
        assert not list(tmp_path.glob("state-*/*"))
        undisturbed = run_experiment(load_experiment(tmp_path / "experiment.toml"), out=tmp_path / "virtual")
        assert nodes.summary["final_loss"] == pytest.approx(undisturbed.summary["final_loss"], rel=1e-4)
        metrics = [row for row in nodes.rows("metrics") if row["node"] == "0"]
        assert [float(row["value"]) for row in metrics if row["name"] == "round"] == list(range(40))
        assert {row["value"] for row in metrics if row["name"] == "missing"} == {"0.0"}
        assert "crash" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_an_interrupted_run_goes_on_when_all_are_started_again(tmp_path: Path) -> None:
    with fleet(tmp_path, EXPERIMENT.format(clients=2, rounds=40), 3, state=True) as nodes:
        nodes.until_rounds_are_saved()
        nodes.processes[0].send_signal(signal.SIGTERM)
        assert set(nodes.ends().values()) == {130}
        assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
        for node in range(3):
            nodes.start(node)
        assert nodes.ends() == dict.fromkeys(range(3), 0)
        undisturbed = run_experiment(load_experiment(tmp_path / "experiment.toml"), out=tmp_path / "virtual")
        assert nodes.summary["final_loss"] == pytest.approx(undisturbed.summary["final_loss"], rel=1e-4)
        assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
