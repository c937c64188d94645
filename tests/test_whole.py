"""Files that are replaced are whole or not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from edgefl.whole import replacing, write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_at_the_end_and_not_before(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    with replacing(path, durable=durable) as file:
        file.write(b"n")
        file.flush()
        assert path.read_text() == "old"
        file.write(b"ew")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    with pytest.raises(type(error)) as caught, replacing(path) as file:
        file.write(b"half of it")
        raise error
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    if isinstance(caught.value, OSError):
        assert caught.value.filename == str(path), "a failed write does not say where by itself"
