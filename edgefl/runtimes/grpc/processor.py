"""A node's processor on the wall clock: work in a worker thread, slowed to its device if that is asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from edgefl.errors import ConfigError
from edgefl.learning.cost import duration_s
from edgefl.learning.executors import Executor
from edgefl.learning.learner import Learner
from edgefl.learning.work import Call, Work
from edgefl.nodes.handles import Task
from edgefl.nodes.plan import NodeSpec


class Host(Protocol):
    """What a processor asks of its runtime."""

    def clock(self) -> float: ...
    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None: ...
    def call_from_thread(self, call: Callable[..., None], *args: Any) -> None: ...


class Item:
    """One work item under way."""

    __slots__ = ("cancelled", "seconds", "share", "start_s", "task", "token", "work")

    def __init__(self, work: Work, task: Task[Any], token: int, share: float | None) -> None:
        self.work, self.task, self.token, self.share = work, task, token, share
        self.seconds: float | None = None
        self.start_s = 0.0
        self.cancelled = False


class WallProcessor:
    """Items in order of arrival, `lanes` at a time; reserved shares beside them.

    emulate: an item takes at least as long as the cost model says for the node's device. `finished` is
    called with the item and its result (or the exception that it raised).
    """

    def __init__(
        self,
        spec: NodeSpec,
        learner: Learner | None,
        executor: Executor | None,
        pool: ThreadPoolExecutor,
        host: Host,
        finished: Callable[[Item, object], None],
        *,
        emulate: bool,
    ) -> None:
        self._spec, self._learner, self._executor, self._pool = spec, learner, executor, pool
        self._host, self._finished, self._emulate = host, finished, emulate
        self._queue: deque[Item] = deque()
        self._running: dict[Item, None] = {}
        self._by_task: dict[Task[Any], Item] = {}
        self.busy_s = 0.0

    def submit(self, task: Task[Any], token: int, work: Work, share: float | None) -> None:
        """Queue an item, or start it at once on a reserved share."""
        item = Item(work, task, token, share)
        if self._emulate:
            learner: Any = self._learner
            item.seconds = (
                duration_s(work.cost(learner), self._spec.profile) * self._spec.slowdown / (share or 1)
            )
        self._by_task[task] = item
        if share is not None:
            self._start(item)
        else:
            self._queue.append(item)
            self._fill()

    def withdraw(self, task: Task[Any]) -> None:
        """Cancel a task's item; one that runs is charged until now and its result is dropped."""
        item = self._by_task.pop(task, None)
        if item is None:
            return
        item.cancelled = True
        if item in self._running:
            self._end(item)
        else:
            self._queue.remove(item)

    def _fill(self) -> None:
        queued = sum(1 for item in self._running if item.share is None)
        while self._queue and queued < self._spec.profile.lanes:
            self._start(self._queue.popleft())
            queued += 1

    def _start(self, item: Item) -> None:
        item.start_s = self._host.clock()
        self._running[item] = None
        self._pool.submit(self._carry_out, item)

    def _carry_out(self, item: Item) -> None:
        """In the worker thread."""
        if item.cancelled:
            return
        if self._executor is not None:
            result = self._executor.run([item.work])[0]
        elif isinstance(item.work, Call):
            try:
                result = item.work.fn(*item.work.args)
            except Exception as error:
                result = error
        else:
            result = ConfigError("model", None, f"{type(item.work).__name__} needs a [model]")
        self._host.call_from_thread(self._carried_out, item, result)

    def _carried_out(self, item: Item, result: object) -> None:
        if item.cancelled:
            return
        rest_s = 0.0 if item.seconds is None else item.start_s + item.seconds - self._host.clock()
        if rest_s > 0:
            self._host.call_later(rest_s, self._complete, item, result)
        else:
            self._complete(item, result)

    def _complete(self, item: Item, result: object) -> None:
        if not item.cancelled:
            del self._by_task[item.task]
            self._end(item)
            self._finished(item, result)

    def _end(self, item: Item) -> None:
        del self._running[item]
        self.busy_s += (self._host.clock() - item.start_s) * (item.share or 1.0)
        self._fill()
