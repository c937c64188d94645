"""Ended at random moments by all signals: nothing is half-done, and what goes on is as if undisturbed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from kill_lab import SEED, Blow, Command, blow, contents, done, drafts, expect_end, struck, whole

import edgefl
from edgefl.experiment.comparison import load_comparison

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc"),
]
PIECES = range(4)
EACH = 5
EXPERIMENT = """
seed = 3
[method]
name = "fedavg"
[fleet]
devices = { raspberry-pi-4b = 2, jetson-nano = 1 }
[data]
num_train = 400
num_test = 100
[model]
hidden = [16]
[train]
local_steps = 3
[evaluate]
every_rounds = 5
[stop]
rounds = ROUNDS
[execution]
CHECKPOINTS
"""


def experiment(folder: Path, *, rounds: int, checkpoints: bool = False) -> Path:
    text = EXPERIMENT.replace("ROUNDS", str(rounds))
    path = folder / "small.toml"
    path.write_text(text.replace("CHECKPOINTS", "checkpoint_s = 0.1" if checkpoints else ""))
    return path


def timed(words: list[str], cwd: Path, folder: Path) -> tuple[float, float]:
    """Run a command undisturbed: seconds until its folder is there, and from then to its end."""
    start_s, command = time.monotonic(), Command(words, cwd)
    command.until(Blow(-1, signal.SIGTERM, True, 0.0), folder)
    begun_s = time.monotonic()
    code, said = command.ends()
    assert code == 0, said
    return begun_s - start_s, time.monotonic() - begun_s


@pytest.mark.parametrize("piece", PIECES)
def test_a_virtual_run_goes_on_as_if_undisturbed(piece: int, tmp_path: Path) -> None:
    """Struck as it runs, and once more as it goes on; half of the pieces keep checkpoints."""
    experiment(tmp_path, rounds=600, checkpoints=piece % 2 == 1)
    words = ["run", "small.toml", "--quiet", "--out"]
    begin_s, rest_s = timed([*words, "undisturbed"], tmp_path, tmp_path / "undisturbed")
    for number in range(EACH):
        out = tmp_path / f"run-{number}"
        first, second = (blow("virtual", 10 * piece + number + n, begin_s, rest_s) for n in (0, 100))
        struck([*words, out.name], tmp_path, out, first)
        if not out.exists():
            struck([*words, out.name], tmp_path, out, second)
        elif whole(out, first) != "finished":
            struck(["run", "--resume", out.name, "--quiet"], tmp_path, out, second)
        if not out.exists():
            done([*words, out.name], tmp_path, second)
        elif whole(out, second) != "finished":
            done(["run", "--resume", out.name, "--quiet"], tmp_path, second)
        else:  # perhaps without its views
            done(["report", out.name], tmp_path, second)
            done(["export", out.name], tmp_path, second)
        assert whole(out, second) == "finished" and not drafts(tmp_path), (first, second, drafts(tmp_path))
        assert contents(out) == contents(tmp_path / "undisturbed"), (first, second)
        assert not (out / "checkpoint").exists(), (first, second)


@pytest.mark.parametrize("piece", PIECES)
def test_a_run_over_processes_ends_with_its_lead_and_outlives_a_client(piece: int, tmp_path: Path) -> None:
    experiment(tmp_path, rounds=150)
    words = ["run", "small.toml", "--runtime", "local", "--processes", "--quiet", "--out"]
    begin_s, rest_s = timed([*words, "undisturbed"], tmp_path, tmp_path / "undisturbed")
    accuracy = edgefl.load(tmp_path / "undisturbed").summary["final_accuracy"]
    for number in range(EACH):
        out, moment = tmp_path / f"run-{number}", blow("processes", 10 * piece + number, begin_s, rest_s)
        if (piece + number) % 2:
            struck([*words, out.name], tmp_path, out, moment)
            assert not out.exists() or whole(out, moment) in ("running", "interrupted", "finished"), moment
            if out.exists():
                assert edgefl.load(out).record["status"] in ("interrupted", "finished"), moment
        else:
            strike_a_client([*words, out.name], tmp_path, out, moment)
    done([*words, "anew"], tmp_path, SEED)
    assert edgefl.load(tmp_path / "anew").summary["final_accuracy"] == pytest.approx(accuracy, abs=0.02)


def strike_a_client(words: list[str], cwd: Path, out: Path, moment: Blow) -> None:
    """The run says at once that it cannot begin without it, or goes on and ends well."""
    command = Command(words, cwd)
    command.until(Blow(moment.number, moment.with_signal, True, moment.delay_s), out)
    clients = [pid for pid, line in command.processes() if " node --fleet " in line]
    if clients:
        os.kill(clients[moment.number % len(clients)], moment.with_signal)
    code, said = command.ends()
    if code == 1:
        assert whole(out, moment) == "failed" and "before the run began" in said, (moment, said)
    else:
        assert code == 0 and whole(out, moment) == "finished", (moment, code, said)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("kind", ["compare", "sweep"])
def test_a_batch_goes_on_by_the_same_command(kind: str, piece: int, tmp_path: Path) -> None:
    """The command itself is struck, or one of its workers is killed."""
    experiment(tmp_path, rounds=150, checkpoints=piece % 2 == 1)
    varied = {"compare": ["--methods", "fedavg,fedasync"], "sweep": ["--grid", "train.local_steps=2,3"]}[kind]
    words = [kind, "small.toml", *varied, "--jobs", "2", "--quiet", "--out"]
    whole_batch = tmp_path / "undisturbed"
    begin_s, rest_s = timed([*words, whole_batch.name], tmp_path, whole_batch)
    labels = [path.name for path in whole_batch.iterdir() if path.is_dir()]
    assert len(labels) == 2
    for number in range(EACH):
        out, moment = tmp_path / f"{kind}-{number}", blow(kind, 10 * piece + number, begin_s, rest_s)
        if (piece + number) % 3:
            struck([*words, out.name], tmp_path, out, moment)
        else:
            kill_a_worker([*words, out.name], tmp_path, out, moment)
        for label in labels:
            assert not (out / label).exists() or whole(out / label, moment), moment
        done([*words, out.name], tmp_path, moment)
        assert not drafts(tmp_path), (moment, drafts(tmp_path))
        for label in labels:
            assert contents(out / label) == contents(whole_batch / label), (moment, label)
        assert (out / "comparison.html").exists() and not load_comparison(out).failures, moment


def kill_a_worker(words: list[str], cwd: Path, out: Path, moment: Blow) -> None:
    """The batch names the run that was lost with it, and does the others."""
    command = Command(words, cwd)
    command.until(moment, out)
    workers = [pid for pid, line in command.processes() if "edgefl.experiment.worker" in line]
    if workers:
        os.kill(workers[moment.number % len(workers)], signal.SIGKILL)
    code, said = command.ends()
    assert code in (0, 1) and (code == 0 or "was ended by SIGKILL" in said), (moment, code, said)
    expect_end(0, said, moment)
