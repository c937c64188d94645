"""The clocks of a run's processes: they start with the lead's, and go on with it after a crash."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from toy import Watcher, toy_plan

from edgefl.nodes import Message, Node
from edgefl.runtimes.grpc.local import run_here
from edgefl.runtimes.grpc.state import StateFolder
from edgefl.runtimes.grpc.transport import Transport

LATE_S = 1.0


@dataclass(frozen=True)
class Time(Message):
    time_s: float


class _Recorder(Watcher):
    """A watcher whose records need not travel."""

    def export(self) -> dict[str, Any]:
        return {}

    def merge(self, rows: dict[str, Any]) -> None:
        """Nothing."""


def test_clocks_start_together_when_the_lead_is_the_last_to_have_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = Transport.start
    apart: list[float] = []

    async def late(self: Transport) -> None:
        await start(self)
        await asyncio.sleep(LATE_S if self._me.index == 0 else 0.0)

    async def lead(node: Node) -> None:
        await node.send(1, Time(node.now()))

    async def other(node: Node) -> None:
        message = await node.receive(Time)
        apart.append(node.now() - message.time_s)

    monkeypatch.setattr(Transport, "start", late)
    plan = toy_plan([lead, other], (Time,))
    run_here(plan, [_Recorder(), _Recorder()], None, run_id="clocks", digest="clocks")
    assert abs(apart[0]) < LATE_S / 2


def test_a_returning_process_does_not_count_the_time_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("edgefl.runtimes.grpc.state.time.time", lambda: now_s[0])
    first = StateFolder(tmp_path, "run", "digest")
    first.begin()
    now_s[0] += 60.0  # it waits for the others
    first.start(0.25)
    assert StateFolder(tmp_path, "run", "digest").began_s == 1060.0 - 0.25
