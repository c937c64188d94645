"""Commands that are ended at random moments: started, struck, and looked over afterwards (Linux)."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from edgefl.experiment.config import load_experiment
from edgefl.experiment.folder import COLUMNS
from edgefl.keyed import generator

SEED = int(os.environ.get("EDGEFL_KILL_SEED", time.time_ns() % 1_000_000))
"""Draws the moments; every failure names it, and EDGEFL_KILL_SEED repeats them as far as clocks allow."""
END_S = 120.0
"""A busy machine may take that long to end a process, or to run one."""
_MARK = "EDGEFL_TEST_MARK"


@dataclass(frozen=True)
class Blow:
    """A signal, so long after the start of the command, or after its folder is there. number: of the draw."""

    number: int
    with_signal: signal.Signals
    after_folder: bool
    delay_s: float

    def __str__(self) -> str:
        since = "there is a folder" if self.after_folder else "its start"
        what = f"{self.with_signal.name} {self.delay_s:.3f} s after {since}"
        return f"EDGEFL_KILL_SEED={SEED}, {self.number}: {what}"


def blow(kind: str, number: int, begin_s: float, rest_s: float) -> Blow:
    """A drawn one: half of them in the `begin_s` until there is a folder, half in the `rest_s` thereafter."""
    rng = generator(SEED, kind, number)
    chosen = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)[int(rng.integers(3))]
    after_folder = bool(rng.integers(2))
    return Blow(number, chosen, after_folder, float(rng.uniform(0, rest_s if after_folder else begin_s)))


class Command:
    """`edgefl` with some words, in a session of its own, with a mark that all its processes inherit."""

    def __init__(self, words: list[str], cwd: Path) -> None:
        self._mark = uuid.uuid4().hex
        self.scratch = cwd / f"scratch-{self._mark}"
        self.scratch.mkdir()
        environment = {**os.environ, _MARK: self._mark, "TMPDIR": str(self.scratch)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edgefl.cli", *words], cwd=cwd, env=environment, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid

    def until(self, blow: Blow, folder: Path) -> None:
        """Wait for the moment of a blow, or for the command's end."""
        deadline = time.monotonic() + END_S
        while blow.after_folder and not folder.exists() and self._process.poll() is None:
            assert time.monotonic() < deadline, blow
            time.sleep(0.002)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(blow.delay_s)

    def ends(self) -> tuple[int, str]:
        """Its exit code, and what it said; none of its processes outlives it by more than a moment."""
        said = self._process.communicate(timeout=END_S)[1]
        deadline = time.monotonic() + END_S
        while others := list(self.processes()):
            assert time.monotonic() < deadline, f"orphans: {others}"
            time.sleep(0.05)
        return self._process.returncode, said

    def processes(self) -> Iterator[tuple[int, str]]:
        """Id and command line of every living process with the mark."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and self._mark.encode() in (entry / "environ").read_bytes():
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    yield int(entry.name), b" ".join(words).decode()


def struck(words: list[str], cwd: Path, folder: Path, blow: Blow) -> None:
    """Start a command and strike it; it ends as the signal asks, and leaves nothing half-done."""
    command = Command(words, cwd)
    command.until(blow, folder)
    with contextlib.suppress(ProcessLookupError):
        os.kill(command.pid, blow.with_signal)
    code, said = command.ends()
    expect_end(code, said, blow)
    if blow.with_signal != signal.SIGKILL:
        assert not list(command.scratch.iterdir()) and not drafts(cwd), (blow, drafts(cwd))


def expect_end(code: int, said: str, blow: Blow) -> None:
    """It was over before the signal, heard it, or had not set up its answer yet."""
    assert code in (0, 130, -blow.with_signal), (blow, code, said)
    if code >= 0:
        assert "Traceback" not in said and "rror" not in said, (blow, said)


def done(words: list[str], cwd: Path, why: object) -> None:
    """Run a command to its end."""
    code, said = Command(words, cwd).ends()
    assert code == 0, (why, words, said)


def drafts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def whole(run: Path, why: object) -> str:
    """The status of a run's folder, each file of which is whole."""
    record = json.loads((run / "run.json").read_text())
    load_experiment(run / "experiment.toml")
    for table in run.glob("*.csv"):
        with table.open(newline="") as file:
            head, *rows = csv.reader(file)
        assert tuple(head) == COLUMNS[table.stem], (why, table)
        assert all(len(row) == len(head) for row in rows), (why, table)
    if (run / "model.safetensors").exists():
        with safe_open(run / "model.safetensors", "pt") as model:
            assert model.keys(), why
    return str(record["status"])


def contents(run: Path) -> dict[str, bytes]:
    """What a virtual run came to, byte for byte."""
    names = [f"{table}.csv" for table in COLUMNS if table != "predicted"] + ["model.safetensors"]
    return {name: (run / name).read_bytes() for name in names}
