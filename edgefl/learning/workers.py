"""Threads that carry work out side by side, each with scratch memory of its own and one torch thread.

Threads and not processes: PyTorch lets go of the interpreter inside its operators, parameters need not be
copied between address spaces, and no worker can die by itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from edgefl.errors import ConfigError
from edgefl.learning.learner import Learner

T = TypeVar("T")
VARIABLE = "EDGEFL_WORKERS"
"""Environment variable with the number of workers of this process; the processor's cores where not set."""
MOST = 4096
"""Workers of a process."""
_BUILDING = threading.Lock()
"""One at a time makes its modules: making one borrows torch's global random state."""


def default_workers() -> int:
    """Workers of this process unless somebody says otherwise.

    Raises ConfigError when the environment names no positive number.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not given.isdecimal() or len(given) > len(str(MOST)) or not 1 <= int(given) <= MOST:
        raise ConfigError(VARIABLE, given, f"a number of threads, 1 to {MOST}")
    return int(given)


class Workers:
    """`count` threads, started when first needed. What they work on they get as values."""

    def __init__(self, learner: Learner, count: int) -> None:
        if count < 1:
            raise ConfigError("workers", count, "at least 1 is needed")
        self.count = count
        self._learner = learner
        self._own = threading.local()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, call: Callable[[Learner], T]) -> Future[T]:
        """Have the next free thread do this with its own learner; calls begin in the order given."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, "edgefl worker", self._begin)
        return self._pool.submit(self._carry_out, call)

    def _begin(self) -> None:
        torch.set_num_threads(1)
        with _BUILDING:
            self._own.learner = self._learner.twin()

    def _carry_out(self, call: Callable[[Learner], T]) -> T:
        return call(self._own.learner)
