"""Disks that fill up: a file system of some kilobytes in the place of a run's folder (needs root)."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from experiment_files import small_file
from small_disk import Disk, disk

import edgefl
from edgefl.errors import ConfigError, RunError
from edgefl.experiment import runner
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
    assert size == "8k" or record["summary"]["rounds"] == 4
    assert not disk.drafts() and not (out / "report.html").exists()
    disk.mount("remount,size=16m")
    resume(out)
    assert contents(out) == contents(tmp_path / "whole")


class Filler:
    """A `Progress` that fills a disk as soon as the run is on its way."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def begin(self, description: str, **_: object) -> None: ...

    def update(self, *_: object) -> None:
        with (self._place / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                continue

    def end(self, status: str) -> None: ...


def test_on_a_disk_that_fills_meanwhile_a_run_on_the_wall_clock_has_room_for_its_end(
    disk: Disk, tmp_path: Path
) -> None:
    disk.mount("size=2m")
    out = disk.place / "run"
    result = run_experiment(
        load_experiment(small_file(tmp_path)), runtime="local", out=out, progress=Filler(disk.place)
    )
    assert (disk.place / "filler").stat().st_size > 1_000_000
    assert edgefl.load(out).record["status"] == "finished" and set(TABLES) < {p.name for p in out.iterdir()}
    assert result.summary["predicted"]["round_s"] and (out / "report.html").exists()


def test_what_finds_no_room_is_named_and_the_rest_is_kept(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most that a run on the wall clock has to say takes little room; its spans take more."""
    monkeypatch.setattr(runner, "TABLES_BYTES", 64 * 1024)
    disk.mount("size=2m")
    out = disk.place / "run"
    experiment = load_experiment(small_file(tmp_path), ["stop.rounds=200"])
    with pytest.raises(RunError, match=r"spans\.csv.* cannot be written \(No space .*; the rest is there$"):
        run_experiment(experiment, runtime="local", out=out, progress=Filler(disk.place))
    run = edgefl.load(out)
    assert run.record["status"] == "failed" and "spans.csv" in run.record["reason"]
    assert run.summary["rounds"] == 200 and len(run.table("nodes")) == 5 and not disk.drafts()
    assert (out / "model.safetensors").exists() and run.curve.step.iloc[-1] == 200
    disk.mount("remount,size=16m")
    assert "No space left" in write_report(out).read_text()


def test_a_run_on_the_wall_clock_is_refused_where_its_results_have_no_room(
    disk: Disk, tmp_path: Path
) -> None:
    disk.mount("size=400k")
    with pytest.raises(ConfigError, match=r"a folder that can be written \(No space left"):
        run_experiment(load_experiment(small_file(tmp_path)), runtime="local", out=disk.place / "run")
    assert not list(disk.place.iterdir())


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
