"""The state folder of a process: what lets it come back after a crash as if it had only been slow.

life.json            which run this is, the life that it is in, and when the run began
state.safetensors    what its program saved last, and its records up to then

Both are written whole or not at all, and neither can run code when it is read.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from edgefl.errors import ConfigError, RunError
from edgefl.parameters import Layout, Vector
from edgefl.whole import write_whole

MOST_BYTES = 8 << 30
"""A larger state file is not read."""
_MOST_LIFE_BYTES = 4096
_LIFE, _STATE, _SKELETON = "life.json", "state.safetensors", "edgefl"


class StateLost(RunError):
    """What a process keeps cannot be written: to the others it is lost as by a crash, and may come back."""


class StateFolder:
    """The folder, for one life of one process.

    life: 0, then one more each time the folder is opened. began_s: when the run began, by time.time(); the
    time for which the whole run was interrupted does not count.
    complete: whether all that was sent to an earlier life since its last save will be sent again.
    """

    def __init__(self, path: Path, run_id: str, digest: str) -> None:
        """Read the folder; `begin` begins the next life in it.

        Raises ConfigError for one that is another run's or cannot be written.
        """
        self.path = path
        self._run = {"run_id": run_id, "digest": digest}
        before = self._read_life()
        self.life = 0 if before is None else before["life"] + 1
        self.began_s = time.time() if before is None else before["began_s"]
        self.complete = before is None or bool(before["complete"])
        self._given_up = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise ConfigError("--state", str(path), f"a folder to write to ({error.strerror})") from error

    def begin(self) -> None:
        """This life has begun: the next one has a higher number."""
        self._write_life()

    def start(self, time_s: float) -> None:
        """The run's clock starts, or says `time_s`, in this first life."""
        self.began_s = time.time() - time_s
        self._write_life()

    def load(self, layouts: Mapping[int, Layout]) -> dict[str, Any] | None:
        """What `write` was given last, None when it never was. layouts: of the run's vectors, by digest.

        Raises ConfigError for a file that is damaged or too large.
        """
        path = self.path / _STATE
        if not path.exists():
            return None
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"it has {path.stat().st_size} bytes, at most {MOST_BYTES} are read")
            return unpack(path, layouts)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError("--state", str(path), f"this node's own state is needed ({error})") from error

    def write(self, content: Mapping[str, Any]) -> None:
        """Put `content` in place of what was there; it is on the disk when this returns.

        Raises RunError for what cannot be stored, and StateLost when the disk refuses it.
        """
        try:
            write_whole(self.path / _STATE, pack(content), durable=True)
        except OSError as error:
            again = "the same command goes on from what it holds"
            raise StateLost(f"{self.path} cannot be written ({error.strerror}); {again}") from error

    def give_up(self) -> None:
        """Note that a next life cannot be told again what this one was told since its last save."""
        self._given_up = True
        self._write_life()

    def pause(self, time_s: float) -> None:
        """The whole run is interrupted here, time_s after it began; it goes on as if no time had passed."""
        self._write_life(paused_s=time_s)

    def clear(self) -> None:
        """The run is over: nothing is to come back to."""
        for name in (_STATE, _LIFE):
            (self.path / name).unlink(missing_ok=True)

    def _read_life(self) -> dict[str, Any] | None:
        path = self.path / _LIFE
        if not path.exists():
            return None
        try:
            with path.open("rb") as file:
                before = json.loads(file.read(_MOST_LIFE_BYTES))
            known = {key: before[key] for key in self._run}
            before["life"] = int(before["life"])
            before["began_s"], before["complete"] = float(before["began_s"]), bool(before["complete"])
            if before["paused_s"] is not None:
                before["began_s"] = time.time() - float(before["paused_s"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            accepted = f"its {_LIFE} cannot be read; remove the folder to begin anew ({error!r})"
            raise ConfigError("--state", str(self.path), accepted) from error
        if known != self._run:
            accepted = (
                f"it belongs to run {known['run_id']!r}, or another experiment; remove it, or name another"
            )
            raise ConfigError("--state", str(self.path), accepted)
        return before  # type: ignore[no-any-return]

    def _write_life(self, *, paused_s: float | None = None) -> None:
        complete = not self._given_up
        own = {"life": self.life, "began_s": self.began_s, "complete": complete, "paused_s": paused_s}
        content = {**self._run, **own}
        write_whole(self.path / _LIFE, json.dumps(content), durable=True)


def pack(content: Mapping[str, Any]) -> bytes:
    """Plain values, tensors and vectors, nested in lists, tuples and dicts, as a safetensors file.

    Raises RunError that names the place of a value of another kind.
    """
    tensors: dict[str, Tensor] = {}

    def put(tensor: Tensor) -> str:
        name = str(len(tensors))
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        return name

    def skeleton(value: Any, where: str) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case np.generic():
                return value.item()
            case bytes():
                return {"bytes": put(torch.from_numpy(np.frombuffer(value, np.uint8).copy()))}
            case Tensor():
                return {"tensor": put(value)}
            case Vector():
                buffers = [put(buffer) for buffer in value.buffers]
                return {"vector": put(value.values), "layout": value.layout.digest, "buffers": buffers}
            case list() | tuple() | set() | frozenset():
                items = [skeleton(item, f"{where}[{i}]") for i, item in enumerate(value)]
                return {type(value).__name__: items}
            case Mapping():
                pairs = [[skeleton(k, where), skeleton(v, f"{where}.{k}")] for k, v in value.items()]
                return {"dict": pairs}
        raise RunError(
            f"{where} is of type {type(value).__name__}: with --state a program saves plain values only"
        )

    text = json.dumps(skeleton(content, "saved"))
    packed: bytes = save(tensors, {_SKELETON: text})
    return packed


_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def unpack(path: Path, layouts: Mapping[int, Layout]) -> dict[str, Any]:
    """What `pack` made into this file. Raises ValueError, KeyError or SafetensorError for anything else."""
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {})[_SKELETON]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)

    def value(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        match tree:
            case {"vector": name, "layout": digest, "buffers": buffers}:
                return Vector(layouts[digest], tensors[name], tuple(tensors[b] for b in buffers))
            case {"tensor": name}:
                return tensors[name]
            case {"bytes": name}:
                return tensors[name].numpy().tobytes()
            case {"dict": pairs}:
                return {value(k): value(v) for k, v in pairs}
        ((kind, items),) = tree.items()
        return _SEQUENCES[kind](value(item) for item in items)

    content = value(json.loads(text))
    if not isinstance(content, dict):
        raise ValueError("it holds no table")
    return content
