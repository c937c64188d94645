"""Processes that end with the one that started them, however that one ends.

A pipe tells: the system closes its other end with the process that holds it, also when that one is killed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping

VARIABLE = "EDGEFL_ENDS_WITH_INPUT"
"""Set in the environment of a process whose standard input is held open by the one that started it."""
ENDING_S = 10.0
"""Time to end in good order once the other process is gone, in seconds."""


def environment() -> Mapping[str, str]:
    """For a process that is started with a pipe as its standard input, and is to end with it."""
    return {**os.environ, VARIABLE: "1"}


def end_with_parent() -> None:
    """Where the environment asks for it: be told to end once whoever started this process is gone."""
    if os.environ.pop(VARIABLE, None) is not None:
        threading.Thread(target=_watch, name="edgefl-parent", daemon=True).start()


def _watch() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ENDING_S)
    os._exit(1)
