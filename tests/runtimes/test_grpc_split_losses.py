"""Split training over real processes that are killed and started again: it ends as if undisturbed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from process_fleet import fleet

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
    devices = num_nodes - (0 if "stages" in settings else 1)
    text = EXPERIMENT.format(method=method, settings=settings, devices=devices, rounds=rounds)
    with fleet(folder, text, num_nodes, state=True, grace_s=grace_s) as nodes:
        nodes.until_rounds_are_saved()
        for victim in victims:
            time.sleep(1.0)
            nodes.kill(victim)
            if grace_s is not None:
                nodes.until(r"nodes \d\) stayed away", 0)
            nodes.start(victim)
            nodes.until(f"node {victim} is back, life 1", victim)
        assert nodes.ends() == dict.fromkeys(range(num_nodes), 0)
        undisturbed = run_experiment(load_experiment(folder / "experiment.toml"), out=folder / "virtual")
        assert nodes.summary["final_loss"] == pytest.approx(undisturbed.summary["final_loss"], rel=1e-4)
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
    events = ends_as_undisturbed(tmp_path, method, [2, 0], "", num_nodes=4, rounds=SEQUENTIAL.get(method, 40))
    assert events[-2:] == [("crash", "0"), ("back", "0")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "stages"), [("dapple", "[[1, 1], [4, 2]]"), ("gpipe", "[[2, 1], [4, 1]]")]
)
def test_a_stage_that_is_given_up_stops_the_step_and_all_go_on(
    method: str, stages: str, tmp_path: Path
) -> None:
    """What was under way to it is lost; the leader calls all to the last common step when it is back."""
    settings = f"[method.{method}]\nmicro_batches = 4\nstages = {stages}"
    num_nodes = 3 if method == "dapple" else 2
    events = ends_as_undisturbed(tmp_path, method, [1], settings, num_nodes=num_nodes, rounds=20, grace_s=2.0)
    assert sorted(kind for kind, _ in events) == ["back", "crash", "gone", "resumed", "stopped"]
