"""Disks that fill up: file systems of some kilobytes (they need root, and Linux)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


class Disk:
    """A small file system in memory."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def mount(self, options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")

    def unmount(self) -> bool:
        return subprocess.run(["umount", "-l", str(self.place)], capture_output=True).returncode == 0

    def drafts(self) -> list[Path]:
        return [path for path in self.place.rglob("*") if ".tmp" in path.name]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mounted by the test with the size that it needs."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("to mount a file system takes root on Linux")
    place = tmp_path / "disk"
    place.mkdir()
    yield Disk(place)
    while Disk(place).unmount():
        continue
