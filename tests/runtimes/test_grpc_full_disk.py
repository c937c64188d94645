"""A node whose state finds no room is lost to the others as by a crash, and goes on when there is room."""

from __future__ import annotations

from pathlib import Path

import pytest
from process_fleet import fleet
from small_disk import Disk, disk
from test_grpc_processes import EXPERIMENT

__all__ = ["disk"]


@pytest.mark.slow
def test_a_server_without_room_for_its_state_leaves_and_comes_back(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "state-0").symlink_to(disk.place)
    disk.mount("size=12k")
    with fleet(tmp_path, EXPERIMENT.format(clients=2, rounds=30), 3, state=True, grace_s=120) as nodes:
        nodes.processes[0].communicate(timeout=120)
        assert nodes.processes[0].returncode == 1
        assert "No space left on device" in nodes.log(0).read_text().splitlines()[-1]
        assert (disk.place / "life.json").exists() and not disk.drafts()
        assert [nodes.processes[i].poll() for i in (1, 2)] == [None, None]
        disk.mount("remount,size=16m")
        nodes.start(0, 120)
        assert nodes.ends() == {0: 0, 1: 0, 2: 0}
        assert (nodes.summary["status"], nodes.summary["nodes"]) == ("finished", 3)
