"""Disks that fill up: a file system of some kilobytes in the place of a run's folder (needs root)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from experiment_files import small_file
from small_disk import Disk, disk

import edgefl
from edgefl.errors import ConfigError, RunError
from edgefl.experiment.compare import compare
from edgefl.experiment.config import load_experiment
from edgefl.experiment.report import write_report
from edgefl.experiment.runner import resume, run_experiment

__all__ = ["disk"]
TABLES = ("curve.csv", "metrics.csv", "nodes.csv", "traffic.csv", "spans.csv", "model.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TABLES}


def test_where_nothing_fits_there_is_nothing(disk: Disk, tmp_path: Path) -> None:
    disk.mount("size=4k")
    with pytest.raises(ConfigError, match="No space left on device"):
        run_experiment(load_experiment(small_file(tmp_path)), out=disk.place / "run")
    assert not list(disk.place.iterdir())


@pytest.mark.parametrize("size", ["8k", "12k", "20k", "28k"])
def test_a_run_that_does_not_fit_says_so_and_goes_on_when_there_is_room(
    disk: Disk, tmp_path: Path, size: str
) -> None:
    """8k: not even a second run.json fits beside the first."""
    path, out = small_file(tmp_path), disk.place / "run"
    run_experiment(load_experiment(path), out=tmp_path / "whole")
    disk.mount(f"size={size}")
    with pytest.raises(RunError, match="No space left on device"):
        run_experiment(load_experiment(path), out=out)
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "failed" and "No space left" in record["reason"]
    assert not disk.drafts() and not (out / "report.html").exists()
    disk.mount("remount,size=16m")
    resume(out)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_report_that_does_not_fit_leaves_the_old_one(disk: Disk, tmp_path: Path) -> None:
    disk.mount("size=16m")
    folder = run_experiment(load_experiment(small_file(tmp_path)), out=disk.place / "run").folder
    page = (folder / "report.html").read_bytes()
    used = os.statvfs(disk.place)
    disk.mount(f"remount,size={(used.f_blocks - used.f_bfree) * used.f_frsize}")
    with pytest.raises(OSError, match="No space left on device"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == page and not disk.drafts()


def test_a_run_that_fits_but_for_its_report_is_complete(disk: Disk, tmp_path: Path) -> None:
    path = small_file(tmp_path)
    whole = run_experiment(load_experiment(path), out=tmp_path / "whole").folder
    room = sum(-(-p.stat().st_size // 4096) * 4096 for p in whole.iterdir() if p.name not in VIEWS)
    disk.mount(f"size={room + 8192}")
    with pytest.raises(RunError, match="the run is over, but its report"):
        run_experiment(load_experiment(path), out=disk.place / "run")
    assert edgefl.load(disk.place / "run").record["status"] == "finished"
    assert contents(disk.place / "run") == contents(whole) and not disk.drafts()


VIEWS = ("report.html", "trace.json")


@pytest.mark.slow
def test_a_comparison_goes_on_when_there_is_room(disk: Disk, tmp_path: Path) -> None:
    path, out = small_file(tmp_path), disk.place / "out"
    whole = compare(path, ["fedavg", "d-psgd"], out=tmp_path / "whole")
    for size in ("20k", "40k", "100k"):
        disk.mount(f"size={size}")
        try:
            assert compare(path, ["fedavg", "d-psgd"], out=out).failures
        except OSError as error:
            assert error.filename.startswith(str(out))
        assert not disk.drafts()
        disk.mount("remount,size=16m")
        again = compare(path, ["fedavg", "d-psgd"], out=out)
        assert not again.failures and again.report.exists()
        for label in ("fedavg-3", "d-psgd-3"):
            assert contents(out / label) == contents(whole.folder / label)
        disk.unmount()
