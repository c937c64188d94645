"""The event loop of a process: asyncio's, with timers that are good for a tenth of a millisecond."""

from __future__ import annotations

import asyncio
import gc
import select
import selectors
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_MOST_FD = 1023
"""select takes no file descriptor above it."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as asyncio.run does.

    What is there before is left out of garbage collection until then: to look through a process with PyTorch
    takes 0.15 s, in the midst of a step.
    """
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=_precise) as runner:
            return runner.run(main)
    finally:
        gc.unfreeze()


def _precise() -> asyncio.AbstractEventLoop:
    if sys.platform != "linux":
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(_Selector())


if sys.platform == "linux":

    class _Selector(selectors.EpollSelector):
        """epoll waits whole milliseconds, rounded up; select, here for the epoll itself, as long as is said.

        A pipeline of emulated boards has some fifty waits of a few milliseconds in a step, and each was
        0.59 ms late in the median; so it is 0.14 ms.
        """

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0 and self.fileno() <= _MOST_FD:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)
