"""Processors in virtual time: who computes when is decided by cost, what comes out by a deferred batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from mypy_extensions import mypyc_attr

from edgefl.errors import ConfigError
from edgefl.keyed import generator
from edgefl.learning.cost import Cost, duration_s
from edgefl.learning.executors import Executor, Promise
from edgefl.learning.learner import Learner
from edgefl.learning.work import Call, Evaluate, Gradient, LocalSGD, Work
from edgefl.nodes.handles import Task
from edgefl.nodes.plan import NodeSpec, Thermal

_BLOCK = 256
BEGIN_AT_ONCE = (LocalSGD, Gradient, Evaluate)
"""Work that depends on nothing but its values, and may be done before its time."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Jitter:
    """Log-normal factors of mean 1, an endless stream keyed by (seed, node)."""

    __slots__ = ("_block", "_factors", "_node", "_seed", "_sigma")

    def __init__(self, sigma: float, seed: int, node: int) -> None:
        self._sigma, self._seed, self._node = sigma, seed, node
        self._block, self._factors = 0, list[float]()

    def next(self) -> float:
        if self._sigma == 0:
            return 1.0
        if not self._factors:
            rng = generator(self._seed, "compute jitter", self._node, self._block)
            self._block += 1
            factors = np.exp(rng.normal(-(self._sigma**2) / 2, self._sigma, _BLOCK))
            self._factors = factors[::-1].tolist()
        return self._factors.pop()


@mypyc_attr(allow_interpreted_subclasses=True)
class Item:
    """One work item under way: who waits for it, how long it takes, and, once carried out, its result."""

    __slots__ = (
        "cancelled", "carried_out", "key", "processor", "result", "seconds", "share", "start_s",
        "task", "token", "work",
    )  # fmt: skip

    def __init__(
        self, work: Work, task: Task[Any], token: int, processor: Processor, share: float | None
    ) -> None:
        self.work, self.task, self.token, self.processor, self.share = work, task, token, processor, share
        self.seconds, self.start_s = 0.0, -1.0
        self.key: Hashable = None
        self.result: object = None
        self.carried_out = self.cancelled = False


@mypyc_attr(allow_interpreted_subclasses=True)
class Workshop:
    """Carries out the fleet's work.

    An item waits until as many of its batch key are under way as the executor takes at once, or until its
    result is due in virtual time; then all that wait with this key are carried out together. Which items
    those are depends on virtual events only. Items without a batch key begin at once where the executor has
    workers. With workers the clock goes on until a result that is not there yet is due.

    When the first of them is due, those with its key that still wait, too few for a group, are begun too:
    most likely they are carried out as they are. Where others join them before that, or one leaves, it was
    in vain: what is then carried out is what would have been, and this key's are not begun ahead again.
    """

    def __init__(self, executor: Executor | None) -> None:
        self._executor = executor
        self._pending: dict[Hashable, dict[Item, None]] = {}
        self._begun: dict[Item, Promise] = {}
        """What workers are at."""
        self._ahead: dict[Hashable, Sequence[Promise]] = {}
        """What they are at ahead: all that wait with this key, in their order."""
        self._in_vain: set[Hashable] = set()
        self.batches = self.items = 0

    def admit(self, item: Item) -> None:
        executor = self._executor
        if isinstance(item.work, Call) or executor is None:
            return
        item.key = executor.group_key(item.work)
        if item.key is not None:
            waiting = self._pending.setdefault(item.key, {})
            waiting[item] = None
            self._changed(item.key)
            if len(waiting) >= executor.group:
                self._carry_out_all(list(self._pending.pop(item.key)), executor.num_workers > 0)
        elif executor.num_workers and type(item.work) in BEGIN_AT_ONCE:
            (self._begun[item],) = executor.start([item.work])
            self._count(1)

    def withdraw(self, item: Item) -> None:
        begun = self._begun.pop(item, None)
        if begun is not None:
            begun.cancel()
        if item.key is not None and item in self._pending.get(item.key, {}):
            del self._pending[item.key][item]
            self._changed(item.key)

    def _changed(self, key: Hashable) -> None:
        """Others wait with this key now than those that may have been begun ahead."""
        if self._ahead.pop(key, None) is not None:
            self._in_vain.add(key)

    def result(self, item: Item) -> object:
        """The item's result, or the exception that it raised."""
        if not item.carried_out and item not in self._begun:
            batch = [item] if item.key is None else list(self._pending.pop(item.key))
            self._carry_out_all(batch, beside=False)
        begun = self._begun.pop(item, None)
        if begun is not None:
            self._begin_ahead(item.key)
            item.result, item.carried_out = begun.result(), True
        return item.result

    def _begin_ahead(self, key: Hashable) -> None:
        waiting = self._pending.get(key, {})
        known = key in self._ahead or key in self._in_vain
        if self._executor is not None and len(waiting) > 1 and not known:
            self._ahead[key] = self._executor.start([item.work for item in waiting])

    def finish(self) -> None:
        """Wait for all that workers are at: afterwards items hold their results."""
        for item, future in self._begun.items():
            item.result, item.carried_out = future.result(), True
        self._begun.clear()
        self._ahead.clear()

    def _count(self, items: int) -> None:
        self.batches += 1
        self.items += items

    def _carry_out_all(self, batch: list[Item], beside: bool) -> None:
        """Carry a batch out, or begin it beside the clock."""
        self._count(len(batch))
        works = [item.work for item in batch]
        ahead = self._ahead.pop(batch[0].key, None)
        if ahead is None and self._executor is not None and beside:
            ahead = self._executor.start(works)
        if ahead is not None:
            self._begun.update(zip(batch, ahead, strict=True))
            return
        for item, result in zip(batch, self._carry_out(works), strict=True):
            item.result, item.carried_out = result, True

    def _carry_out(self, works: list[Work]) -> list[object]:
        if self._executor is not None:
            return self._executor.run(works)
        return [run_alone(work) for work in works]


def run_alone(work: Work) -> object:
    """Work in a run without a model: only Call makes sense."""
    if not isinstance(work, Call):
        raise ConfigError("model", None, f"{type(work).__name__} needs a [model]")
    try:
        return work.fn(*work.args)
    except Exception as error:
        return error


@mypyc_attr(allow_interpreted_subclasses=True)
class Heat:
    """How hot a processor is: 0 as at the start, 1 where it begins to throttle; it stops at a half."""

    __slots__ = ("_level", "_thermal", "_throttled", "_updated_s")

    def __init__(self, thermal: Thermal) -> None:
        self._thermal = thermal
        self._level, self._updated_s, self._throttled = 0.0, 0.0, False

    def pass_time(self, now: float, working: bool) -> None:
        """It has worked, or rested, since the last call."""
        seconds, self._updated_s = now - self._updated_s, now
        if working:
            self._level = min(1.0, self._level + seconds / self._thermal.after_s)
        else:
            self._level = max(0.0, self._level - seconds / self._thermal.recover_s)
        if self._level >= 1 - 1e-12:
            self._throttled = True
        elif self._level <= 0.5:
            self._throttled = False

    @property
    def factor(self) -> float:
        """How many times longer work takes now."""
        return self._thermal.slowdown if self._throttled else 1.0


@mypyc_attr(allow_interpreted_subclasses=True)
class Processor:
    """One node's processor: `lanes` items at a time in order of arrival, and reserved shares beside them."""

    def __init__(
        self,
        node: int,
        spec: NodeSpec,
        learner: Learner | None,
        workshop: Workshop,
        jitter: Jitter,
        call_later: Callable[..., None],
        finished: Callable[[Item], None],
    ) -> None:
        self.node, self._spec, self._learner, self._workshop = node, spec, learner, workshop
        self._jitter, self._call_later, self._finished = jitter, call_later, finished
        self._queue: deque[Item] = deque()
        self._running: dict[Item, None] = {}
        self._taken = 0
        """Lanes taken: items that run without a share."""
        self._by_task: dict[Task[Any], Item] = {}
        self._heat = None if spec.thermal is None else Heat(spec.thermal)
        self._cost: Cost | None = None
        self._seconds = 0.0
        """How long work of the latest cost takes, but for jitter."""
        self.busy_s = 0.0

    def busy_until(self, now: float) -> float:
        """busy_s with what is under way."""
        return self.busy_s + sum((now - item.start_s) * (item.share or 1.0) for item in self._running)

    def submit(self, task: Task[Any], token: int, work: Work, share: float | None, now: float) -> None:
        """Queue an item, or start it at once on a reserved share."""
        item = Item(work, task, token, self, share)
        learner: Any = self._learner  # Call states its cost without one
        cost = work.cost(learner)
        if cost is not self._cost:
            self._cost, self._seconds = cost, duration_s(cost, self._spec.profile) * self._spec.slowdown
        item.seconds = self._seconds * self._jitter.next()
        self._by_task[task] = item
        self._workshop.admit(item)
        if share is not None:
            item.seconds /= share
            self._start(item, now)
        else:
            self._queue.append(item)
            self._fill(now)

    def withdraw(self, task: Task[Any], now: float) -> None:
        """Cancel a task's item: charged until now, and never carried out."""
        item = self._by_task.pop(task, None)
        if item is None:
            return
        item.cancelled = True
        self._workshop.withdraw(item)
        if item in self._running:
            self._end(item, now)
            self._fill(now)
        else:
            self._queue.remove(item)

    def clear(self, now: float) -> None:
        """A crash: nothing of what is under way will be done."""
        for task in list(self._by_task):
            item = self._by_task.pop(task)
            item.cancelled = True
            self._workshop.withdraw(item)
            if item in self._running:
                self._end(item, now)
        self._queue.clear()

    def complete(self, item: Item, now: float) -> None:
        """Called when an item's time is over."""
        if item.cancelled:
            return
        del self._by_task[item.task]
        self._end(item, now)
        self._fill(now)
        self._finished(item)

    def _fill(self, now: float) -> None:
        while self._queue and self._taken < self._spec.profile.lanes:
            self._start(self._queue.popleft(), now)

    def _start(self, item: Item, now: float) -> None:
        item.start_s = now
        if self._heat is not None:
            # An item goes on as it began: heat counts from one item to the next.
            self._heat.pass_time(now, working=bool(self._running))
            item.seconds *= self._heat.factor
        if self._spec.speed is not None:
            item.seconds = self._spec.speed.done_s(now, item.seconds) - now
        self._running[item] = None
        if item.share is None:
            self._taken += 1
        self._call_later(item.seconds, self._due, item)

    def _due(self, item: Item) -> None:
        if not item.cancelled:
            self.complete(item, item.start_s + item.seconds)

    def _end(self, item: Item, now: float) -> None:
        if self._heat is not None:
            self._heat.pass_time(now, working=True)
        del self._running[item]
        if item.share is None:
            self._taken -= 1
        self.busy_s += (now - item.start_s) * (item.share or 1.0)
