"""The log of a node's programs since its last save, and how fresh coroutines are fed from it.

A program is a function of its saved state and of what it has been told since: results of its awaits and
what it saw on the way. A log holds that, in order, for all tasks of a node together, since they
share variables. Feeding it to fresh coroutines brings them to where the old ones were.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from mypy_extensions import mypyc_attr

from edgefl.errors import Cancelled, RunError

if TYPE_CHECKING:
    from edgefl.learning.workload import Workload
    from edgefl.nodes.handles import Task

_STEP, _END, _SAW = 0, 1, 2
_MOST_UNWINDING_AWAITS = 100


class _Diverged(RunError):
    def __init__(self) -> None:
        super().__init__("a program does not go on from what it saved as it went on when it saved it")


@mypyc_attr(allow_interpreted_subclasses=True)
class Log:
    """Entries: (step, task index, time, value, error), (end, task index, time), (saw, value).

    saved, workload: the saved state and the workload with which the program set out where the log begins.
    """

    __slots__ = ("entries", "saved", "workload")

    def __init__(self, saved: dict[str, Any] | None, workload: Workload) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.saved, self.workload = saved, workload

    def step(self, index: int, time_s: float, value: Any, error: BaseException | None) -> None:
        """A task went on with a value or an error."""
        self.entries.append((_STEP, index, time_s, value, error))

    def end(self, index: int, time_s: float) -> None:
        """A task was cancelled."""
        self.entries.append((_END, index, time_s))

    def saw(self, value: Any) -> None:
        """A program asked something and was given this."""
        self.entries.append((_SAW, value))

    def clear(self, saved: dict[str, Any], workload: Workload) -> None:
        """The program has saved all that it needs to come here again."""
        self.entries.clear()
        self.saved, self.workload = saved, workload

    def restart(self, time_s: float, workload: Workload) -> None:
        """The program is where it would be if it had just been started."""
        self.entries[:] = [(_STEP, 0, time_s, None, None)]
        self.workload = workload


class Replay:
    """Feeds a log to fresh coroutines. time_s: the time at which what is being fed happened."""

    def __init__(self, log: Log, main: Task[Any], coroutine: Coroutine[Any, Any, Any]) -> None:
        self._entries = log.entries
        self._at = 0
        self._coroutines: dict[int, Coroutine[Any, Any, Any]] = {main.index: coroutine}
        self._tasks: dict[int, Task[Any]] = {main.index: main}
        self.time_s = 0.0

    def run(self) -> None:
        """Feed everything; afterwards each task that has not ended holds its coroutine.

        Raises RunError for a program that does not go on from what it saved as it went on then.
        """
        while self._at < len(self._entries):
            self._feed()
        lost = [task for i, task in self._tasks.items() if not task.finished and i not in self._coroutines]
        if lost:
            raise _Diverged()
        for index, coroutine in self._coroutines.items():
            self._tasks[index].coroutine = coroutine

    def _feed(self) -> None:
        entry = self._next()
        if entry[0] == _END:
            self._end(entry)
            return
        if entry[0] != _STEP or entry[1] not in self._coroutines:
            raise _Diverged()
        _, index, self.time_s, value, error = entry
        coroutine = self._coroutines[index]
        try:
            coroutine.send(value) if error is None else coroutine.throw(error)
        except _Diverged:
            raise
        except (StopIteration, Cancelled, Exception):
            del self._coroutines[index]  # it ended here, as it did then

    def _end(self, entry: tuple[Any, ...]) -> None:
        _, index, self.time_s = entry
        coroutine = self._coroutines.pop(index, None)
        if coroutine is None:
            return
        try:
            unwind(coroutine)
        except Exception:
            return  # it failed while ending, as it did then

    def _next(self) -> tuple[Any, ...]:
        entry = self._entries[self._at]
        self._at += 1
        return entry

    def seen(self) -> Any:
        """What the program was given for what it asks now."""
        entry = self._next() if self._at < len(self._entries) else (None,)
        if entry[0] != _SAW:
            raise _Diverged()
        return entry[1]

    def started(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The task that the program started here then; the coroutine is its new body."""
        task = self.seen()
        self._tasks[task.index] = task
        self._coroutines[task.index] = coroutine
        return task

    def cancelled(self, task: Task[Any]) -> None:
        """The program cancels a task: it ends with its children, as it did then."""
        if task.index not in self._coroutines:
            return
        while True:
            entry = self._next()
            self._end(entry)
            if entry[1] == task.index:
                return


def unwind(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Raise Cancelled in a coroutine until it has ended; what else it raises passes through."""
    for _ in range(_MOST_UNWINDING_AWAITS):
        try:
            coroutine.throw(Cancelled())
        except (Cancelled, StopIteration):
            return
    coroutine.close()
