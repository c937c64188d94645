"""Many runs side by side: each in a process of its own, what is done skipped, one failure survived."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgefl.errors import ConfigError
from edgefl.experiment.config import Experiment

DONE = ("finished", "stopped")
GRACE_S = 10.0
"""Time that an interrupted run has to write its state before it is killed, in seconds."""


@dataclass(frozen=True)
class Job:
    """One run of a batch. label: its name and its folder's, unique in the batch. variant: what it varies."""

    label: str
    variant: str
    seed: int
    experiment: Experiment


@dataclass(frozen=True)
class Ended:
    """How a job ended: with a summary, or with the reason why there is none."""

    job: Job
    summary: Mapping[str, Any] | None = None
    reason: str | None = None


class BatchProgress(Protocol):
    """Whoever watches a batch. All calls come from the thread that called `run_jobs`."""

    def begin(self, labels: Sequence[str]) -> None:
        """The batch starts with these jobs."""

    def started(self, label: str) -> None:
        """A job's process has started."""

    def update(self, label: str, state: Mapping[str, Any]) -> None:
        """A running job is here: the keys of `worker`'s progress events."""

    def ended(self, label: str, summary: Mapping[str, Any] | None, reason: str | None, reused: bool) -> None:
        """A job ended with a summary or a reason; reused: it was done before this batch began."""

    def end(self) -> None:
        """The batch is over, also after an error or an interruption."""


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_run(folder: Path) -> dict[str, Any] | None:
    """run.json of a run folder; None where there is none that can be read."""
    try:
        found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def run_jobs(
    jobs: Sequence[Job], folder: Path, *, workers: int, progress: BatchProgress | None = None
) -> list[Ended]:
    """Run the jobs into `folder`/label, `workers` at a time; returns how each ended, in the order of `jobs`.

    A job whose folder holds a finished run of the same resolved experiment is skipped; an unfinished one
    goes on. A job that fails does not stop the others. On KeyboardInterrupt the running ones are
    interrupted (their folders stay resumable) and the error passes on.
    Raises ConfigError when a folder holds another experiment, before anything starts.
    """
    ended: dict[str, Ended] = {}
    for job in jobs:
        summary = _done_before(job, folder / job.label)
        if summary is not None:
            ended[job.label] = Ended(job, summary)
    folder.mkdir(parents=True, exist_ok=True)
    watcher = progress or _Nobody()
    watcher.begin([job.label for job in jobs])
    try:
        for label, end in ended.items():
            watcher.ended(label, end.summary, None, True)
        todo = [job for job in jobs if job.label not in ended]
        with tempfile.TemporaryDirectory(prefix="edgefl-") as scratch:
            for end in _run_all(todo, folder, Path(scratch), workers, watcher):
                ended[end.job.label] = end
                watcher.ended(end.job.label, end.summary, end.reason, False)
    finally:
        watcher.end()
    return [ended[job.label] for job in jobs]


class _Nobody:
    """Watches nothing."""

    def begin(self, labels: Sequence[str]) -> None: ...
    def started(self, label: str) -> None: ...
    def update(self, label: str, state: Mapping[str, Any]) -> None: ...
    def ended(
        self, label: str, summary: Mapping[str, Any] | None, reason: str | None, reused: bool
    ) -> None: ...
    def end(self) -> None: ...


def _done_before(job: Job, folder: Path) -> dict[str, Any] | None:
    if not folder.exists():
        return None
    found = read_run(folder)
    file = folder / "experiment.toml"
    same = file.is_file() and file.read_text(encoding="utf-8") == job.experiment.to_toml()
    if found is None or not same:
        raise ConfigError("--out", str(folder), "it holds another experiment; name a new folder or remove it")
    return found["summary"] if found.get("status") in DONE else None


@dataclass
class _Running:
    """A job's process, and the thread that reads it."""

    job: Job
    process: subprocess.Popen[str]
    errors: Path
    last: dict[str, Any] = field(default_factory=dict)


def _run_all(
    todo: Sequence[Job], folder: Path, scratch: Path, workers: int, watcher: BatchProgress
) -> Iterator[Ended]:
    events: queue.Queue[tuple[_Running, dict[str, Any] | None]] = queue.Queue()
    waiting, running = list(todo), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                running.append(_start(job, folder / job.label, scratch, events))
                watcher.started(job.label)
            one, event = _next(events)
            if event is None:
                running.remove(one)
                one.process.wait()
                yield _ended(one)
            elif event["event"] == "progress":
                watcher.update(one.job.label, event)
            else:
                one.last = event
    finally:
        _stop(running)


def _next(events: queue.Queue[tuple[_Running, dict[str, Any] | None]]) -> tuple[_Running, dict[str, Any] | None]:
    while True:  # a get without a time-out cannot be interrupted by Ctrl-C on every platform
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=0.5)


def _start(
    job: Job, out: Path, scratch: Path, events: queue.Queue[tuple[_Running, dict[str, Any] | None]]
) -> _Running:
    file, errors = scratch / f"{job.label}.toml", scratch / f"{job.label}.log"
    file.write_text(job.experiment.to_toml(), encoding="utf-8")
    with errors.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "edgefl.experiment.worker", str(file), str(out)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches the batch alone, which then interrupts each run once
        )
    one = _Running(job, process, errors)
    threading.Thread(target=_read, args=(one, events), daemon=True).start()
    return one


def _read(one: _Running, events: queue.Queue[tuple[_Running, dict[str, Any] | None]]) -> None:
    assert one.process.stdout is not None
    with one.process.stdout as lines:
        for line in lines:
            events.put((one, json.loads(line)))
    events.put((one, None))


def _ended(one: _Running) -> Ended:
    if one.last.get("event") == "done":
        return Ended(one.job, summary=one.last["summary"])
    if "reason" in one.last:
        return Ended(one.job, reason=str(one.last["reason"]))
    lines = one.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = f": {lines[-1]}" if lines else ""
    return Ended(one.job, reason=f"its process {_how(one.process.returncode)}{said}")


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _stop(running: Sequence[_Running]) -> None:
    """Interrupt what still runs, give it time to write its state, then kill it."""
    for one in running:
        if sys.platform == "win32":
            one.process.terminate()
        else:
            one.process.send_signal(signal.SIGINT)
    for one in running:
        try:
            one.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
