"""Worker processes as a batch sees them: given tasks, heard through one queue, stopped together."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GRACE_S = 10.0
"""Time that an interrupted run has to write its state before its process is killed, in seconds."""

Event = tuple["Worker", dict[str, Any] | None]
"""A line that a worker wrote; None: its process is over."""


def ending(code: int) -> str:
    """How a process ended, by its return code: "ended with exit code 1", "was ended by SIGTERM"."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"


class Worker:
    """One process of `edgefl.experiment.worker`, with one torch thread and one worker.

    task: the label of what it carries out now. log: the file that takes its standard error.
    """

    def __init__(self, events: queue.Queue[Event], log: Path) -> None:
        self.task: str | None = None
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "edgefl.experiment.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "EDGEFL_WORKERS": "1"},
                start_new_session=True,  # Ctrl-C reaches the batch alone, which interrupts each worker once
            )
        threading.Thread(target=self._read, args=(events,), daemon=True).start()

    def give(self, label: str, file: Path, out: Path) -> None:
        """Hand it its next task; it must have none."""
        self.task = label
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: its event None tells
            self._process.stdin.write(json.dumps({"file": str(file), "out": str(out)}) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """No more tasks: it ends by itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def how_it_ended(self) -> str:
        """For a process that died with a task: its signal or exit code, and the last line that it wrote."""
        code = self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = f": {lines[-1]}" if lines else ""
        return f"its process {ending(code)}{said}"

    def interrupt(self) -> None:
        """Ask it to leave its run in a state that can go on."""
        self.close()
        if sys.platform == "win32":
            self._process.terminate()
        else:
            self._process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        """Wait for its end, and kill it after `GRACE_S`, or when nobody wants to wait."""
        self.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.wait()

    def _read(self, events: queue.Queue[Event]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                events.put((self, json.loads(line)))
        events.put((self, None))


def stop(workers: Sequence[Worker]) -> None:
    """Interrupt all workers and wait for them."""
    try:
        for worker in workers:
            worker.interrupt()
        for worker in workers:
            worker.wait()
    finally:  # a second Ctrl-C waits for nobody
        for worker in workers:
            worker.kill()
