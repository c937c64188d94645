"""Files that are whole or not there: no reader, crash or full disk ever sees half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """A new file to write, which takes the place of `path` when the block ends, and vanishes when it fails.

    durable: it is on the disk when the block is over; after a power cut there is the old file or the new one.
    """
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with draft.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # a failed write names no file
        raise
    if durable and os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_whole(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace a file's content, as `replacing` does; text is written in UTF-8.

    Names of files that are none in this locale are written with the bytes that they have.
    """
    with replacing(path, durable=durable) as file:
        file.write(content.encode(errors="surrogateescape") if isinstance(content, str) else content)
