"""Many runs side by side in worker processes: what is done is skipped, one failure survived."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgefl.errors import ConfigError
from edgefl.experiment.config import Experiment
from edgefl.experiment.pool import Event, Worker, stop
from edgefl.experiment.state import State

DONE = ("finished", "stopped")


@dataclass(frozen=True)
class Job:
    """One run of a batch. label: its name and its folder's, unique in the batch. variant: what it varies."""

    label: str
    variant: str
    seed: int
    experiment: Experiment


@dataclass(frozen=True)
class Result:
    """How a job ended: with a summary, or with the reason why there is none."""

    label: str
    variant: str
    seed: int
    summary: Mapping[str, Any] | None = None
    reason: str | None = None


class BatchProgress(Protocol):
    """Whoever watches a batch. All calls come from the thread that called `run_jobs`."""

    def begin(self, labels: Sequence[str]) -> None:
        """The batch starts with these jobs."""

    def started(self, label: str) -> None:
        """A job was given to a process."""

    def update(self, label: str, state: State) -> None:
        """A running job is here."""

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


def done_before(jobs: Sequence[Job], folder: Path) -> dict[str, Result]:
    """The jobs, by label, whose folder `folder`/label holds a finished run of the same resolved experiment.

    Raises ConfigError when such a folder holds another experiment, or none.
    """
    found = ((job, _finished(job, folder / job.label)) for job in jobs)
    return {job.label: _result(job, summary=summary) for job, summary in found if summary is not None}


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    done: Mapping[str, Result],
    *,
    workers: int,
    progress: BatchProgress | None = None,
) -> list[Result]:
    """Run the jobs that are not in `done` into `folder`/label, `workers` at a time.

    Returns how each job ended, in the order of `jobs`. An unfinished run goes on. A job that fails does not
    stop the others. On KeyboardInterrupt the running ones are interrupted (their folders stay resumable)
    and the error passes on.
    """
    ended, watcher = dict(done), progress or _Nobody()
    watcher.begin([job.label for job in jobs])
    try:
        for label, result in done.items():
            watcher.ended(label, result.summary, None, True)
        todo = [job for job in jobs if job.label not in done]
        # Closing stops what runs as soon as its block is left, by an interruption too.
        with (
            tempfile.TemporaryDirectory(prefix="edgefl-") as scratch,
            contextlib.closing(_run_all(todo, folder, Path(scratch), workers, watcher)) as results,
        ):
            for result in results:
                ended[result.label] = result
                watcher.ended(result.label, result.summary, result.reason, False)
    finally:
        watcher.end()
    return [ended[job.label] for job in jobs]


class _Nobody:
    """Watches nothing."""

    def begin(self, labels: Sequence[str]) -> None: ...
    def started(self, label: str) -> None: ...
    def update(self, label: str, state: State) -> None: ...
    def ended(
        self, label: str, summary: Mapping[str, Any] | None, reason: str | None, reused: bool
    ) -> None: ...
    def end(self) -> None: ...


def _result(job: Job, summary: Mapping[str, Any] | None = None, reason: str | None = None) -> Result:
    return Result(job.label, job.variant, job.seed, summary, reason)


def _finished(job: Job, folder: Path) -> dict[str, Any] | None:
    if not folder.exists():
        return None
    found = read_run(folder)
    file = folder / "experiment.toml"
    same = file.is_file() and file.read_bytes() == job.experiment.to_toml().encode()
    if found is None or not same:
        raise ConfigError("--out", str(folder), "it holds another experiment; name a new folder or remove it")
    summary = found.get("summary") if found.get("status") in DONE else None
    return summary if isinstance(summary, dict) else None


def _run_all(
    todo: Sequence[Job], folder: Path, scratch: Path, num_workers: int, watcher: BatchProgress
) -> Generator[Result, None, None]:
    """Give each worker one job after the other; a worker that dies takes its job with it and is replaced."""
    events: queue.Queue[Event] = queue.Queue()
    jobs, waiting = {job.label: job for job in todo}, list(todo)
    workers = [Worker(events, scratch / f"{i}.log") for i in range(min(num_workers, len(todo)))]
    busy = list(workers)
    try:
        for worker in workers:
            _give_next(worker, waiting, folder, scratch, watcher)
        while busy:
            worker, event = _next(events)
            label = worker.task
            if event is None:
                busy.remove(worker)
                worker.wait()
                if label is not None:
                    yield _result(jobs[label], reason=worker.how_it_ended())
                    if waiting:
                        busy.append(Worker(events, scratch / f"{waiting[0].label}.log"))
                        _give_next(busy[-1], waiting, folder, scratch, watcher)
            elif label is not None and event["event"] == "progress":
                watcher.update(label, State(**event["state"]))
            elif label is not None:
                yield _result(jobs[label], summary=event.get("summary"), reason=event.get("reason"))
                _give_next(worker, waiting, folder, scratch, watcher)
    finally:
        stop(busy)


def _give_next(
    worker: Worker, waiting: list[Job], folder: Path, scratch: Path, watcher: BatchProgress
) -> None:
    worker.task = None
    if not waiting:
        worker.close()
        return
    job = waiting.pop(0)
    file = scratch / f"{job.label}.toml"
    file.write_text(job.experiment.to_toml(), encoding="utf-8")
    worker.give(job.label, file, folder / job.label)
    watcher.started(job.label)


def _next(events: queue.Queue[Event]) -> Event:
    while True:  # a get without a time-out cannot be interrupted by Ctrl-C on every platform
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=0.5)
