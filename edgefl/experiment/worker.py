"""One run in a process of its own: `python -m edgefl.experiment.worker FILE OUT`, started by `batch`.

It speaks on its standard output, one JSON object per line: {"event": "progress", ...} while it runs, then
one of {"event": "done", "summary": {...}}, {"event": "refused" | "failed" | "interrupted", "reason": ...}.
When nobody reads any more, the next line fails and the run ends: no orphan goes on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

from edgefl.errors import ConfigError, EdgeflError
from edgefl.experiment.config import load_experiment
from edgefl.experiment.runner import resume, run_experiment


class Channel:
    """Progress and the end of one run as lines of JSON."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def say(self, event: str, **body: object) -> None:
        """Write one line and flush it."""
        self._stream.write(json.dumps({"event": event, **body}) + "\n")
        self._stream.flush()


def _own_stdout() -> TextIO:
    """The real standard output; whatever else prints in this process goes to standard error instead."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def main(file: str, out: str) -> int:
    """Run the resolved experiment in `file` into the folder `out`, or go on with what lies there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits "ignore"
    channel = Channel(_own_stdout())
    folder = Path(out)
    try:
        if folder.exists():
            result = resume(folder, progress=channel)
        else:
            result = run_experiment(load_experiment(file), out=folder, progress=channel)
    except KeyboardInterrupt:
        channel.say("interrupted", reason="interrupted")
    except ConfigError as error:
        channel.say("refused", reason=str(error))
    except EdgeflError as error:
        channel.say("failed", reason=str(error))
    else:
        channel.say("done", summary=result.summary)
        return 0
    return 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
