"""Runs in threads, loops and forked children, killed and interrupted: as they are met outside of tests."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from experiment_files import small_file

import edgefl
from edgefl.experiment import folder as folder_module
from edgefl.experiment.config import load_experiment
from edgefl.experiment.report import write_report
from edgefl.experiment.results import Run, load
from edgefl.experiment.runner import resume, run_experiment

REPEATED = ("metrics.csv", "curve.csv", "evaluations.csv", "nodes.csv", "traffic.csv", "spans.csv")


def test_a_run_over_grpc_from_a_loop_that_runs_already(tmp_path: Path) -> None:
    """A notebook's cells are in one."""

    async def cell() -> Run:
        return edgefl.run(small_file(tmp_path), runtime="local", out=tmp_path / "run")

    assert asyncio.run(cell()).summary["status"] == "finished"


def test_a_run_that_was_killed_is_told_from_one_that_goes_on(tmp_path: Path) -> None:
    out = run_experiment(load_experiment(small_file(tmp_path)), out=tmp_path / "run").folder
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(record | {"status": "running", "summary": None}))
    with folder_module.alone(out, "--out"):
        assert load(out).record["status"] == "running"
    assert load(out).record["status"] == "interrupted"
    assert "its process ended without a word" in write_report(out).read_text()
    assert resume(out).summary["status"] == "finished"


def test_where_no_new_file_fits_the_record_is_overwritten(tmp_path: Path) -> None:
    """Within the blocks that it has; a longer one is left out rather than cut off."""
    folder = folder_module.RunFolder.create(tmp_path / "run", "", {"status": "running"})
    folder.overwrite_record({"status": "failed"})
    assert folder.record == {"schema": 1, "status": "failed"}
    folder.overwrite_record({"status": "x" * 100_000})
    assert folder.record["status"] == "failed"


def test_an_interruption_while_the_folder_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder_module.RunFolder, "write_record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(load_experiment(small_file(tmp_path)), out=tmp_path / "deep" / "run")
    assert not list((tmp_path / "deep").iterdir())


def test_runs_in_threads_are_those_of_one_after_the_other(tmp_path: Path) -> None:
    path = small_file(tmp_path)
    run_experiment(load_experiment(path), out=tmp_path / "alone")
    with ThreadPoolExecutor(3) as threads:
        ran = [threads.submit(edgefl.run, path, out=tmp_path / str(k)) for k in range(3)]
    for one in ran:
        for name in REPEATED:
            assert (one.result().path / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


FORKED = """
import multiprocessing, sys, torch
import edgefl
arguments = {"args": (sys.argv[1],), "kwargs": {"out": sys.argv[3]}}
torch.set_num_threads(2)
x = torch.ones(2000, 2000)
(x @ x).sum()
edgefl.run(sys.argv[1], out=sys.argv[2])
child = multiprocessing.get_context("fork").Process(target=edgefl.run, **arguments)
child.start()
child.join(60)
child.kill()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
def test_a_forked_child_of_one_that_ran_can_run(tmp_path: Path) -> None:
    """OpenMP's threads do not come along: with more than one, the child waited for the others for ever."""
    folders = [str(tmp_path / name) for name in ("parent", "child")]
    command = [sys.executable, "-c", FORKED, str(small_file(tmp_path)), *folders]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "2"})
    for name in REPEATED:
        assert (Path(folders[1]) / name).read_bytes() == (Path(folders[0]) / name).read_bytes()


@pytest.mark.slow
def test_processes_of_a_run_end_with_the_one_that_leads_it(tmp_path: Path) -> None:
    """However that one ends."""
    path = small_file(tmp_path)
    command = [sys.executable, "-m", "edgefl", "run", str(path), "--out", str(tmp_path / "run"), "--quiet"]
    more = ["--runtime", "local", "--processes", "--set", "stop.rounds=100000"]
    with subprocess.Popen([*command, *more]) as lead:
        until(lambda: len(nodes_of(tmp_path)) == 4)
        time.sleep(2.0)
        lead.kill()
    assert load(tmp_path / "run").record["status"] == "interrupted"
    until(lambda: not nodes_of(tmp_path))


def nodes_of(folder: Path) -> list[int]:
    """The processes of nodes whose fleet file is in a folder."""
    file = str(folder / "run" / "fleet.toml")
    return [p.pid for p in psutil.process_iter(["cmdline"]) if file in (p.info["cmdline"] or ())]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
