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
import glob
import io
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO

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
        self._room: IO[bytes] | None = None

    @classmethod
    def create(
        cls, path: Path, experiment_toml: str, record: Mapping[str, Any], *, room_bytes: int = 0
    ) -> RunFolder:
        """Make the folder with its first two files and room for more (see `hold_room`), or nothing.

        Raises ConfigError when it exists or cannot be written.
        """
        if _exists(path):
            raise ConfigError("--out", str(path), "it exists already; name another folder, or --resume it")
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        folder = cls(draft)
        _remove_drafts(path)
        try:
            draft.mkdir(parents=True)
            folder.write_text("experiment.toml", experiment_toml)
            folder.write_record(record)
            folder.hold_room(room_bytes)
            os.rename(draft, path)
        except BaseException as error:
            folder.use_room()
            shutil.rmtree(draft, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            accepted = f"a folder that can be written ({error.strerror})"
            raise ConfigError("--out", str(path), accepted) from error
        folder.path = path
        return folder

    @classmethod
    def create_in(
        cls, parent: Path, name: str, experiment_toml: str, record: Mapping[str, Any], *, room_bytes: int = 0
    ) -> RunFolder:
        """Make a folder of this name, or with -2, -3, ... where it is taken; see `create`."""
        path, number = parent / name, 1
        while _exists(path):
            number += 1
            path = parent / f"{name}-{number}"
        return cls.create(path, experiment_toml, record, room_bytes=room_bytes)

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

    def hold_room(self, num_bytes: int) -> None:
        """Keep others from so much of the disk, for what a run leaves at its end, until `use_room`.

        It is a file without a name: it goes with the process, however that one ends.
        Raises OSError where there is not so much.
        """
        if num_bytes:
            self._room = tempfile.TemporaryFile(dir=self.path)  # noqa: SIM115 (for as long as the run)
            self._room.write(os.urandom(num_bytes))  # some file systems would store zeros as nothing
            self._room.flush()

    def use_room(self) -> None:
        """Give free what `hold_room` holds."""
        if self._room is not None:
            room, self._room = self._room, None
            with suppress(OSError):  # what had not been written
                room.close()

    @property
    def record(self) -> dict[str, Any]:
        """What run.json says."""
        loaded: dict[str, Any] = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        return loaded

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write run.json; what is no finite number becomes null."""
        self.write_text("run.json", _record_text(record))

    def overwrite_record(self, record: Mapping[str, Any]) -> bool:
        """Write run.json over the old one, where a full disk has no room beside it; whether it has been.

        Only into the blocks that the old one has, in one call: what does not fit there is left as it was.
        """
        content = _record_text(record).encode(errors="surrogateescape")
        with (self.path / "run.json").open("r+b", buffering=0) as file:
            fits = len(content) <= os.fstat(file.fileno()).st_blocks * _BLOCK_BYTES
            if fits:
                file.truncate(file.write(content))
            return fits

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
    with _locked(path, exclusive=True) as alone:
        if alone is False:
            raise ConfigError(key, str(path), "another process is at work in it; wait for its end, or end it")
        yield


def told(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says; that a run goes on is believed only while a process may be at work in it."""
    if record.get("status") != "running":
        return dict(record)
    with _locked(path, exclusive=False) as deserted:
        if not deserted:
            return dict(record)
    return {**record, "status": "interrupted", "reason": "its process ended without a word"}


@contextmanager
def _locked(path: Path, *, exclusive: bool) -> Iterator[bool | None]:
    """Inside, a folder's lock is held: True; or another process holds it: False; or there is none: None.

    exclusive: to work there; else to look whether somebody does, and many may look at once.
    """
    if sys.platform == "win32":
        yield None
        return
    import fcntl

    handle = os.open(path, os.O_RDONLY)
    try:
        yield _lock(handle, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _lock(handle: int, kind: int) -> bool | None:
    """Take a lock; who finds it held tries once more, since a look from elsewhere takes but a moment."""
    import fcntl

    for last in (False, True):
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not last:
                time.sleep(_GLANCE_S)
        except OSError:  # a file system without locks
            return None
    return False


def _remove_drafts(path: Path) -> None:
    """Remove what processes that were killed in this very moment have left of a folder to come."""
    import psutil

    for draft in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        process = draft.name.split(".")[-2]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            shutil.rmtree(draft, ignore_errors=True)


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
