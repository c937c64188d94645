"""Split training over real processes that are killed and started again: it ends as if undisturbed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from process_fleet import Fleet, fleet

from edgefl.experiment.config import load_experiment
from edgefl.experiment.runner import run_experiment

EXPERIMENT = """
seed = 3
[method]
name = "{method}"
{settings}
[fleet]
devices = {{ raspberry-pi-zero-2w = {devices} }}
[network]
link = "wifi-5"
[data]
num_train = 400
num_test = 100
[model]
hidden = [32, 16, 24]
[train]
batch_size = 32
local_steps = 5
[execution]
emulate = true
[stop]
rounds = {rounds}
"""


def experiment(method: str, settings: str, *, num_nodes: int, rounds: int) -> str:
    devices = num_nodes - (0 if "stages" in settings else 1)
    return EXPERIMENT.format(method=method, settings=settings, devices=devices, rounds=rounds)


def ends_alike(nodes: Fleet, folder: Path) -> None:
    """The processes that are left end well, with the loss of an undisturbed run in virtual time."""
    assert nodes.ends() == dict.fromkeys(nodes.processes, 0)
    undisturbed = run_experiment(load_experiment(folder / "experiment.toml"), out=folder / "virtual")
    assert nodes.summary["final_loss"] == pytest.approx(undisturbed.summary["final_loss"], rel=1e-4)


def ends_as_undisturbed(
    folder: Path,
    method: str,
    victims: list[int],
    settings: str,
    *,
    num_nodes: int,
    rounds: int,
    grace_s: float | None = None,
) -> list[tuple[str, str]]:
    """Kill processes in the run, one after the other, start each again, and compare; the run's events."""
    text = experiment(method, settings, num_nodes=num_nodes, rounds=rounds)
    with fleet(folder, text, num_nodes, state=True, grace_s=grace_s) as nodes:
        nodes.until_rounds_are_saved()
        for victim in victims:
            time.sleep(1.0)
            nodes.kill(victim)
            if grace_s is not None:
                nodes.until(r"nodes \d\) stayed away", 0)
            nodes.start(victim)
            nodes.until(f"node {victim} is back, life 1", victim)
            for other in set(nodes.processes) - {victim}:  # each has what the victim is to be told again
                nodes.until(rf"connected to process {victim} \(.*\), life 1", other)
        ends_alike(nodes, folder)
        return nodes.events()


SEQUENTIAL = {"split-learning": 15, "split-learning-u": 10}
"""Rounds of methods in which clients take turns."""
STAGES = "micro_batches = 4\nstages = [[1, 1], [2, 1], [4, 1]]"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "victim"), [("dapple", 0), ("dapple", 1), ("dapple", 2), ("gpipe", 1)])
def test_a_killed_stage_goes_on_from_its_last_step(method: str, victim: int, tmp_path: Path) -> None:
    """It is sent again what it had not used up, and the others wait for it."""
    settings = f"[method.{method}]\n{STAGES}"
    events = ends_as_undisturbed(tmp_path, method, [victim], settings, num_nodes=3, rounds=20)
    assert events == [("crash", str(victim)), ("back", str(victim))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["split-learning", "split-learning-u", "splitfed-v1", "splitfed-v2", "parallel-split", "edgesplit",
     "hsfl", "hsfl-layerwise"],
)  # fmt: skip
def test_a_killed_client_and_a_killed_server_go_on(method: str, tmp_path: Path) -> None:
    """The client goes through its turn again, the server through its round."""
    rounds, settings = SEQUENTIAL.get(method, 40), ""
    if "hsfl" in method:  # a plan made anew for what computing took is another one on a busy machine
        settings = f"[method.{method}]\nreplan_rounds = {rounds}"
    events = ends_as_undisturbed(tmp_path, method, [2, 0], settings, num_nodes=4, rounds=rounds)
    assert events[-2:] == [("crash", "0"), ("back", "0")]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dapple", "gpipe"])
def test_a_stage_that_is_given_up_stops_the_step_and_all_go_on(method: str, tmp_path: Path) -> None:
    """What was under way to it is lost; the leader calls all to the last common step when it is back."""
    settings = f"[method.{method}]\nmicro_batches = 4\nstages = [[2, 1], [4, 1]]"
    events = ends_as_undisturbed(tmp_path, method, [1], settings, num_nodes=2, rounds=20, grace_s=2.0)
    assert sorted(kind for kind, _ in events) == ["back", "crash", "gone", "resumed", "stopped", "waiting"]


@pytest.mark.slow
def test_a_replica_that_is_given_up_is_done_without_until_it_is_back(tmp_path: Path) -> None:
    settings = "[method.dapple]\nmicro_batches = 4\nstages = [[1, 1], [4, 2]]"
    events = ends_as_undisturbed(tmp_path, "dapple", [1], settings, num_nodes=3, rounds=60, grace_s=2.0)
    kinds = [kind for kind, _ in events if kind in ("gone", "stopped", "resumed", "waiting")]
    assert kinds == ["gone", *["stopped", "resumed"] * 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dapple", "stages = [[1, 1], [4, 2]]"),
        ("gpipe", "stages = [[1, 1], [2, 1], [4, 1]]\ncopy_every = 2"),
    ],
)
def test_those_who_are_left_go_on_without_a_process_that_is_killed_for_good(
    method: str, settings: str, tmp_path: Path
) -> None:
    """kill -9 of a replica, and of the only device of a stage of which a neighbour keeps copies."""
    settings = f"[method.{method}]\nmicro_batches = 4\n{settings}"
    text = experiment(method, settings, num_nodes=3, rounds=20)
    with fleet(tmp_path, text, 3, state=True, grace_s=2.0) as nodes:
        nodes.until_rounds_are_saved()
        time.sleep(1.0)
        nodes.kill(2)
        del nodes.processes[2]
        ends_alike(nodes, tmp_path)
        rows = [row for row in nodes.rows("events") if row["kind"] in ("gone", "stopped", "resumed")]
        assert [row["kind"] for row in rows] == ["gone", "stopped", "resumed"]
        assert " steps without peer 2: " in rows[-1]["detail"]
