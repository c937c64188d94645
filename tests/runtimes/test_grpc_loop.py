"""The event loop of a process: timers to a tenth of a millisecond, and no look at what was there before."""

from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from edgefl.runtimes.grpc.loop import run


async def lateness_s() -> list[float]:
    """How late waits are that lie well between two milliseconds."""
    loop, found = asyncio.get_running_loop(), []
    for _ in range(40):
        due = loop.time() + 0.0042
        await asyncio.sleep(0.0042)
        found.append(loop.time() - due)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere asyncio's own loop is used")
def test_waits_are_not_rounded_up_to_milliseconds() -> None:
    """The best of forty: other work on the machine makes some late. All of asyncio's own are, by 0.7 ms."""
    late_s = run(lateness_s())
    assert 0 <= min(late_s) < 0.0005


def test_what_was_there_before_a_run_is_left_alone_until_its_end() -> None:
    async def frozen() -> int:
        return gc.get_freeze_count()

    before = gc.get_freeze_count()
    assert run(frozen()) > 10_000
    assert gc.get_freeze_count() == 0 <= before


def test_an_error_comes_through_and_everything_is_as_before() -> None:
    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(fails())
    assert gc.get_freeze_count() == 0
