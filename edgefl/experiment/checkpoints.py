"""Virtual runs that keep checkpoints: `execution.checkpoint_s` asks for them.

They are off unless asked for: the logs that they need grow with a method's rounds between two saves, and most
runs are repeated from their seed sooner than they would be written.
"""

from __future__ import annotations

import json
import logging
import pickle
import time

from edgefl.experiment.build import Built
from edgefl.experiment.folder import RunFolder
from edgefl.experiment.observer import RunObserver
from edgefl.experiment.profile import FILE as PROFILE_FILE
from edgefl.experiment.profile import RunProfile
from edgefl.runtimes.outcome import Outcome
from edgefl.runtimes.virtual import VirtualRuntime
from edgefl.runtimes.virtual.checkpoint import restore_checkpoint, take_checkpoint

log = logging.getLogger("edgefl.checkpoints")
FILE = "checkpoint"


class Checkpoints:
    """Writes a checkpoint into the run's folder every so many wall-clock seconds; the newest one counts."""

    def __init__(self, folder: RunFolder, observer: RunObserver, every_s: float) -> None:
        self._folder, self._observer, self._every_s = folder, observer, every_s
        self._latest = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._latest >= self._every_s

    def write(self, runtime: VirtualRuntime) -> None:
        """Write one; a program that holds what cannot be stored ends the checkpoints, not the run."""
        try:
            data = take_checkpoint(runtime, self._observer.state())
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            log.warning("no checkpoints of this run (%s): it would be resumed from its seed", error)
            self._every_s = float("inf")
            return
        self._folder.write_bytes(FILE, data)
        self._latest = time.monotonic()


def run_virtual(folder: RunFolder, built: Built, observer: RunObserver, *, profiled: bool = False) -> Outcome:
    """Run in virtual time, from the folder's checkpoint where it has one, else from the start.

    profiled: leave a profile of where the wall time went in the folder.
    """
    every_s = built.experiment.execution.checkpoint_s
    checkpoints = None if every_s is None else Checkpoints(folder, observer, every_s)
    runtime = VirtualRuntime(built.plan, observer, built.executor, checkpoints)
    kept = folder.path / FILE
    if checkpoints is not None and kept.exists():
        observer.restore(restore_checkpoint(runtime, kept.read_bytes()))
    profile = RunProfile(runtime, observer) if profiled else None
    outcome = runtime.run()
    if profile is not None:
        folder.write_text(PROFILE_FILE, json.dumps(profile.result(), indent=2) + "\n")
    kept.unlink(missing_ok=True)
    return outcome
