"""Threads that carry work out side by side, each with one torch thread.

Threads and not processes: PyTorch lets go of the interpreter inside its operators, parameters need not be
copied between address spaces, and no worker can die by itself.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from edgefl.errors import ConfigError

T = TypeVar("T")
VARIABLE = "EDGEFL_WORKERS"
"""Environment variable with the number of threads at work in this process; its cores where not set."""
MOST = 4096
"""Threads of a process."""


def default_workers() -> int:
    """Threads at work in this process unless somebody says otherwise.

    Raises ConfigError when the environment names no positive number.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not given.isdecimal() or len(given) > len(str(MOST)) or not 1 <= int(given) <= MOST:
        raise ConfigError(VARIABLE, given, f"a number of threads, 1 to {MOST}")
    return int(given)


class Job(Generic[T]):
    """A call that is carried out once, by a worker or by whoever waits for it first.

    It is told the place of the thread that does it: 0 the caller's, 1 and so on those beside it.
    """

    __slots__ = ("_call", "_future", "_workers")

    def __init__(self, call: Callable[[int], T], workers: Workers) -> None:
        self._call, self._workers = call, workers
        self._future: Future[T] = Future()

    def result(self) -> T:
        """What the call returned, or what it raised. Who waits carries out what nobody has begun yet: this
        job, or the oldest."""
        while not self._future.done() and self._workers.help(self):
            pass
        return self._future.result()

    def cancel(self) -> bool:
        """Nobody wants it any more; whether that kept it from being carried out."""
        return self._future.cancel()

    def carry_out(self, place: int) -> None:
        """Carry it out, unless it was cancelled."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result(self._call(place))
        except BaseException as error:  # it is raised where the result is asked for
            self._future.set_exception(error)


class Workers:
    """`count` threads at work, the caller's among them. What they work on they get as values.

    A thread that is asked to work begins when the interpreter comes to it; who waits meanwhile does not wait
    idly, but does what is next itself.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError("workers", count, "at least 1 is needed")
        self.beside = count - 1
        """Threads beside the caller's."""
        self.started = 0
        """How many of them may have begun: each call starts one at most."""
        self._own = threading.local()
        self._waiting: deque[Job[Any]] = deque()
        """What nobody has begun, the oldest first."""
        self._pool: ThreadPoolExecutor | None = None
        self._places = itertools.count(1)

    def submit(self, call: Callable[[int], T]) -> Job[T]:
        """Have the next free thread do this; calls begin in the order given."""
        job = Job(call, self)
        self._waiting.append(job)
        if self.beside:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.beside, "edgefl worker", self._begin)
            self.started = min(self.started + 1, self.beside)
            self._pool.submit(self._carry_out_next)
        return job

    def help(self, wanted: Job[Any]) -> bool:
        """In the caller's thread: carry out a job, or else the oldest, that nobody has begun; whether there
        was one."""
        try:
            self._waiting.remove(wanted)
        except ValueError:
            if not self._waiting:
                return False
            return self._carry_out(0)
        wanted.carry_out(0)
        return True

    def _begin(self) -> None:
        torch.set_num_threads(1)
        self._own.place = next(self._places)

    def _carry_out_next(self) -> None:
        self._carry_out(self._own.place)

    def _carry_out(self, place: int) -> bool:
        try:
            job = self._waiting.popleft()
        except IndexError:  # somebody else was first
            return False
        job.carry_out(place)
        return True
