"""The run folder: what a run leaves behind, the same from every runtime.

experiment.toml  the resolved experiment; running it again repeats the run
run.json         schema, status, reason, versions, commit, machine, wall times, summary
metrics.csv      time_s, node, name, value: what programs recorded
curve.csv        time_s, step, value, loss, worst_tenth, best, payload_bytes, joules: one row an evaluation
evaluations.csv  time_s, node (-1: a joint model), step, metric, loss
nodes.csv        node, role, device, num_examples, busy_s, idle_s, sent_bytes, received_bytes, joules, metric,
                 loss, energy (whether the joules are measured or modelled)
traffic.csv      sender, receiver, kind, messages, payload_bytes, encoded_bytes
spans.csv        node, kind, start_s, end_s, detail
events.csv       time_s, kind, node, detail
partition.csv    node, class, count: training examples (class -1: data without classes)
predicted.csv    node, then round_s, busy_s, sent_bytes and joules of a round, each with what virtual time
                 predicts (predicted_round_s, ...); of runs on the wall clock
model.safetensors  the final model: the server's, or the mean of the nodes'
report.html, trace.json  made from the files above
profile.json     where the wall time went, of a virtual run that was asked to say so
checkpoint       where a virtual run goes on, while it has not ended
fleet.toml, node-ID.log  of a run in several processes: who is where, and what each said

Floats are written so that reading them gives the same bits back; an empty field is a value that is not known.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from edgefl.errors import ConfigError
from edgefl.whole import replacing, write_whole

SCHEMA = 1
"""Version of the folder's form; a reader refuses a newer one."""
_GLANCE_S = 0.1
"""More than a look at whether somebody is at work in a folder takes."""
_BLOCK_BYTES = 512
"""The unit in which a file's blocks are counted, whatever the file system's own."""
COLUMNS = {
    "metrics": ("time_s", "node", "name", "value"),
    "curve": ("time_s", "step", "value", "loss", "worst_tenth", "best", "payload_bytes", "joules"),
    "evaluations": ("time_s", "node", "step", "metric", "loss"),
    "nodes": (
        "node", "role", "device", "num_examples", "busy_s", "idle_s", "sent_bytes", "received_bytes",
        "joules", "metric", "loss", "energy",
    ),
    "traffic": ("sender", "receiver", "kind", "messages", "payload_bytes", "encoded_bytes"),
    "spans": ("node", "kind", "start_s", "end_s", "detail"),
    "events": ("time_s", "kind", "node", "detail"),
    "partition": ("node", "class", "count"),
    "predicted": (
        "node", "round_s", "predicted_round_s", "busy_s", "predicted_busy_s",
        "sent_bytes", "predicted_sent_bytes", "joules", "predicted_joules",
    ),
}  # fmt: skip


class RunFolder:
    """One run's folder. Every file is written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, experiment_toml: str, record: Mapping[str, Any]) -> RunFolder:
        """Make the folder with its first two files, or nothing.

        Raises ConfigError when it exists or cannot be written.
        """
        if _exists(path):
            raise ConfigError("--out", str(path), "it exists already; name another folder, or --resume it")
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            draft.mkdir(parents=True)
            folder = cls(draft)
            folder.write_text("experiment.toml", experiment_toml)
            folder.write_record(record)
            os.rename(draft, path)
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            accepted = f"a folder that can be written ({error.strerror})"
            raise ConfigError("--out", str(path), accepted) from error
        return cls(path)

    @classmethod
    def create_in(cls, parent: Path, name: str, experiment_toml: str, record: Mapping[str, Any]) -> RunFolder:
        """Make a folder of this name, or with -2, -3, ... where it is taken."""
        path, number = parent / name, 1
        while _exists(path):
            number += 1
            path = parent / f"{name}-{number}"
        return cls.create(path, experiment_toml, record)

    @staticmethod
    def latest(parent: Path, name: str) -> Path:
        """The folder that `create_in` made last under this name, or would make first."""
        path, number = parent / name, 2
        while (parent / f"{name}-{number}").exists():
            path, number = parent / f"{name}-{number}", number + 1
        return path

    @classmethod
    def open(cls, path: Path, key: str = "DIR") -> RunFolder:
        """An existing run's folder. Raises ConfigError where it is none, or one of a newer edgefl."""
        folder = cls(path)
        try:
            schema = folder.record["schema"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(key, str(path), "a run's folder, with its run.json, is needed") from error
        if not isinstance(schema, int) or schema > SCHEMA:
            raise ConfigError(
                key, str(path), f"written with schema {schema}; this edgefl reads up to {SCHEMA}"
            )
        return folder

    @property
    def record(self) -> dict[str, Any]:
        """What run.json says."""
        loaded: dict[str, Any] = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        return loaded

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write run.json; what is no finite number becomes null."""
        self.write_text("run.json", _record_text(record))

    def overwrite_record(self, record: Mapping[str, Any]) -> None:
        """Write run.json over the old one, where a full disk has no room beside it.

        Only into the blocks that the old one has, in one call: what does not fit there is left as it was.
        """
        content = _record_text(record).encode(errors="surrogateescape")
        with (self.path / "run.json").open("r+b", buffering=0) as file:
            if len(content) <= os.fstat(file.fileno()).st_blocks * _BLOCK_BYTES:
                file.truncate(file.write(content))

    def write_text(self, name: str, text: str) -> None:
        write_whole(self.path / name, text)

    def write_bytes(self, name: str, content: bytes) -> None:
        write_whole(self.path / name, content)

    def write_table(self, name: str, rows: Iterable[Iterable[Any]]) -> None:
        """Write one of the tables of COLUMNS."""

        with replacing(self.path / f"{name}.csv") as file:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
            _write_csv(text, name, rows)
            text.detach()

    def begins(self, name: str, rows: Iterable[Iterable[Any]]) -> bool:
        """Whether a table that is already there, if it is, is the beginning of one with these rows."""
        path = self.path / f"{name}.csv"
        if not path.exists():
            return True
        text = io.StringIO(newline="")
        _write_csv(text, name, rows)
        return text.getvalue().encode().startswith(path.read_bytes())


@contextmanager
def alone(path: Path, key: str) -> Iterator[None]:
    """Inside, this process is the only one at work in a folder; its end, however it comes, frees the folder.

    Raises ConfigError while another one is at work there. Where the system has no locks, nothing is held.
    """
    if sys.platform == "win32":
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        if not _locked(handle):
            time.sleep(_GLANCE_S)
            if not _locked(handle):
                accepted = "another process is at work in it; wait for its end, or end it"
                raise ConfigError(key, str(path), accepted)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    """Take the lock, or find that another process has it; a file system without any gives it to all."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def told(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says; that a run goes on is believed only while a process may be at work in it."""
    if record.get("status") == "running" and _deserted(path):
        return {**record, "status": "interrupted", "reason": "its process ended without a word"}
    return dict(record)


def _deserted(path: Path) -> bool:
    """Whether nobody is at work in a folder; never known where the system has no locks."""
    if sys.platform == "win32":
        return False
    import fcntl

    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _record_text(record: Mapping[str, Any]) -> str:
    table = _finite({"schema": SCHEMA, **record})
    return json.dumps(table, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:  # too long a name, one with a null byte
        raise ConfigError("--out", str(path), f"a folder that there can be ({error})") from error


def _write_csv(file: TextIO, name: str, rows: Iterable[Iterable[Any]]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS[name])
    writer.writerows(rows)  # floats go by repr, None as nothing


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
