"""A process that carries out runs: `python -m edgefl.experiment.worker`, started by `batch`.

It reads tasks from standard input, one JSON object per line: {"file": a resolved experiment, "out": a run's
folder}. It answers on standard output, in the same form: {"event": "progress", "state": {...}} as the run
goes, then {"event": "done", "summary": {...}} or {"event": "failed", "reason": ...}. It ends with its input.
"""

from __future__ import annotations

import _thread
import json
import os
import queue
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from edgefl.errors import EdgeflError
from edgefl.experiment.config import load_experiment
from edgefl.experiment.runner import RunResult, resume, run_experiment
from edgefl.experiment.state import State


class Channel:
    """The way back to the batch; a `Progress`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._state = State()

    def say(self, event: str, **body: object) -> None:
        """Write one line. When nobody reads any more, the run is interrupted: no orphan goes on."""
        try:
            self._stream.write(json.dumps({"event": event, **body}) + "\n")
            self._stream.flush()
        except BrokenPipeError as error:
            raise KeyboardInterrupt from error

    def begin(
        self, description: str, *, time_s: float | None, rounds: int | None, metric: str, target: float | None
    ) -> None:
        """Keep the limits for the updates to come."""
        self._state = State(metric, target, time_s, rounds)

    def update(
        self, time_s: float, step: int, value: float | None, target: float | None, wall_s: float
    ) -> None:
        """Say where the run is."""
        self._state = replace(self._state, time_s=time_s, step=step, value=value, wall_s=wall_s)
        self.say("progress", state=asdict(self._state))

    def end(self, status: str) -> None:
        """The result says how it ended."""


def _own_stdout() -> TextIO:
    """The real standard output; whatever else prints in this process goes to standard error instead."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def _carry_out(file: str, out: Path, channel: Channel) -> RunResult:
    """Run the experiment in `file` into `out`, or go on with the run that lies there."""
    if out.exists():
        return resume(out, progress=channel)
    return run_experiment(load_experiment(file), out=out, progress=channel)


def _interrupt_once(*_: object) -> None:
    """Interrupt; what comes after the first time is ignored, so that the run's state is written in peace."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


class Tasks:
    """The lines of standard input, one at a time; the end of the input interrupts a task that is being done.

    A batch closes the input of a worker that has no task, or is told to stop; else it was killed.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._busy = False
        threading.Thread(target=self._read, name="edgefl-tasks", daemon=True).start()

    def __iter__(self) -> Iterator[dict[str, str]]:
        while (line := self._lines.get()) is not None:
            self._busy = True
            yield json.loads(line)
            self._busy = False

    def _read(self) -> None:
        rest = b""
        while data := os.read(0, 65536):  # sys.stdin must not be in use when the interpreter ends
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)
        if self._busy:
            _thread.interrupt_main()


def main() -> int:
    """Carry out tasks until the input ends, or until an interruption."""
    signal.signal(signal.SIGINT, _interrupt_once)  # a shell's background job inherits "ignore"
    channel = Channel(_own_stdout())
    try:
        for task in Tasks():
            try:
                result = _carry_out(task["file"], Path(task["out"]), channel)
            except EdgeflError as error:
                channel.say("failed", reason=str(error))
            else:
                channel.say("done", summary=result.summary)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
