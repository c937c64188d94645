"""What is up: a file per lab, written before anything is made and deleted after all is gone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgefl.errors import ConfigError
from edgefl.lab.layout import Layout

FOLDER = Path("/run/edgefl")
NAME = "lab"
"""The lab of the command line; a machine can have others, from Python."""


@dataclass(frozen=True)
class State:
    """A lab that is up or being made. owner: the process whose run it is for, None after `lab up`."""

    layout: Layout
    owner: int | None
    since: str


def path(name: str) -> Path:
    return FOLDER / f"{name}.json"


def claim(state: State) -> None:
    """Write the file of a new lab. Raises ConfigError where there is one of this name."""
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    text = json.dumps({"layout": state.layout.as_dict(), "owner": state.owner, "since": state.since})
    draft = FOLDER / f".{state.layout.name}.{os.getpid()}.tmp"
    try:
        draft.write_text(text, encoding="utf-8")
        os.link(draft, path(state.layout.name))  # whole or not at all, and never over another one
    except FileExistsError:
        raise ConfigError("lab", "a lab is up already", "edgefl lab down takes it down") from None
    finally:
        draft.unlink(missing_ok=True)


def read(name: str) -> State | None:
    """The lab of this name; None where there is none."""
    try:
        table = json.loads(path(name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return State(Layout.from_dict(table["layout"]), table["owner"], table["since"])


def forget(name: str) -> None:
    path(name).unlink(missing_ok=True)


@contextmanager
def turn() -> Iterator[None]:
    """Inside, nobody else takes a lab down."""
    import fcntl  # not on Windows, where `require` has refused by now

    FOLDER.mkdir(mode=0o755, exist_ok=True)
    folder = os.open(FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
