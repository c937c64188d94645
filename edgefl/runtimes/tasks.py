"""Driving programs: coroutines by `send`, in families that end together, and logs of what they were told.

A task is resumed with a value or an error and runs until it awaits an operation that is not ready. What an
operation means is the interpreter's, one floor up in this folder; a wake-up carries the token of the wait
that it belongs to, so that one which comes too late is void.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from mypy_extensions import mypyc_attr

from edgefl.errors import Cancelled, EdgeflError, ProgramFailed, Unreachable
from edgefl.learning.workload import Workload
from edgefl.nodes.handles import Task, Transfer
from edgefl.nodes.node import Node
from edgefl.nodes.operations import Compute, Delivered, First, Join, Left, Op, Receive
from edgefl.nodes.plan import Observer, RunPlan
from edgefl.runtimes.inbox import Inbox
from edgefl.runtimes.log import Log, Replay, unwind

T = TypeVar("T")
WAIT: Any = object()
"""What the beginning of an operation answers when it is not ready: the task is parked."""


@mypyc_attr(allow_interpreted_subclasses=True)
class NodeState:
    """One node as the runtime knows it. known_dead: the peers that it has heard are gone. workload: as its
    program has it in this life."""

    __slots__ = (
        "alive", "id", "inbox", "known_dead", "life", "log", "main", "num_tasks",
        "port", "processor", "saved", "waiting", "workload",
    )  # fmt: skip

    def __init__(self, port: Any, node: int) -> None:
        self.port, self.id = port, node
        self.life, self.alive = 0, True
        self.saved: dict[str, Any] | None = None
        self.known_dead: set[int] = set()
        self.processor: Any = None
        self.main: Task[Any] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget what does not outlive a life."""
        self.inbox = Inbox()
        self.waiting: dict[Task[Any], tuple[Receive, ...]] = {}
        self.num_tasks = 0
        self.workload: Workload = self.port.plan.nodes[self.id].workload
        self.log = Log(self.saved, self.workload)


@mypyc_attr(allow_interpreted_subclasses=True)
class Tasks:
    """The programs of `hosted` nodes of a plan."""

    def __init__(self, plan: RunPlan, observer: Observer, hosted: tuple[int, ...]) -> None:
        self.plan, self.observer = plan, observer
        self.states = {i: NodeState(self, i) for i in hosted}
        self.current: Task[Any] | None = None
        self.results: dict[int, Any] = {}
        self.awaited = {i for role in plan.method.ends_with for i in plan.ids(role)}
        """Nodes whose return ends the run and that have not returned, nor died for good."""
        self.failure: BaseException | None = None
        self.logging = False
        """Whether the programs' logs are kept, so that a checkpoint can be taken."""
        self.replay: Replay | None = None
        """While a restored program is brought to where it was; nothing that it asks for is done again."""

    # --- what the floors above fill in -----------------------------------------------------------

    def clock(self) -> float:
        """Seconds since the run began."""
        raise NotImplementedError

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call at a later time; a wake-up that has become void is recognised by its token."""
        raise NotImplementedError

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        """Call at this same time, after what is going on, in order."""
        raise NotImplementedError

    def withdraw_compute(self, task: Task[Any]) -> None:
        """The task no longer waits for its work."""
        raise NotImplementedError

    def begin(self, task: Task[Any], op: Any) -> Any:
        """Begin an operation: its value when it is ready, WAIT when the task has to wait. May raise."""
        raise NotImplementedError

    # --- lives -----------------------------------------------------------------------------------

    def begin_life(self, node: int) -> None:
        """Start a node's program, from its saved state if it has one."""
        state = self.states[node]
        role = self.plan.nodes[node].role
        program = self.plan.method.roles[role]
        view = Node(self.plan, node, state.life, state, state.saved)
        task: Task[Any] = Task(state, program(view), None, 0)
        state.main, state.num_tasks = task, 1
        self.call_soon(self.wake, task, task.token, None)

    def end_life(self, node: int) -> None:
        """A crash: everything that the node was doing is gone, and nothing more is sent."""
        state = self.states[node]
        state.alive = False
        if state.main is not None and not state.main.finished:
            self._drop(state.main)
        state.reset()

    def _drop(self, task: Task[Any]) -> None:
        """End a task of a dead node without letting it act."""
        for child in list(task.children):
            self._drop(child)
        self._leave_wait(task)
        task.finished = task.cancelled = True
        if task.coroutine is not None:
            with suppress(RuntimeError, EdgeflError):  # it awaits or raises: it is dead, nobody hears of it
                task.coroutine.close()
            task.coroutine = None

    def end_all(self) -> None:
        """Cancel every program that is left, so that nothing outlives the run."""
        for state in self.states.values():
            if state.main is not None and not state.main.finished:
                self._end_task(state.main)

    # --- what a program asks without awaiting ------------------------------------------------------

    def observe(self, state: NodeState, look: Callable[[], T]) -> T:
        if self.replay is not None:
            return self.replay.seen()  # type: ignore[no-any-return]
        value = look()
        if self.logging and self.current is not None:
            state.log.saw(value)
        return value

    def start(self, state: NodeState, work: Coroutine[Any, Any, T] | Op[T]) -> Task[T]:
        parent = self.current
        coroutine = _awaiting(work) if isinstance(work, Op) else work
        if self.replay is not None:
            return self.replay.started(coroutine)  # type: ignore[no-any-return]
        if parent is None or parent.state is not state:
            coroutine.close()
            raise RuntimeError("start() is called by a node's own program while it runs")
        task: Task[T] = Task(state, coroutine, parent, state.num_tasks)
        state.num_tasks += 1
        if self.logging:
            state.log.saw(task)
        parent.children.append(task)
        self.call_soon(self.wake, task, task.token, None)
        return task

    def cancel_task(self, task: Task[Any]) -> None:
        if self.replay is not None:
            self.replay.cancelled(task)
            return
        if task.finished:
            return
        if self._is_running(task):
            raise RuntimeError("a task cannot cancel itself or its parents; return or raise instead")
        self._end_task(task)

    def _is_running(self, task: Task[Any]) -> bool:
        running = self.current
        while running is not None:
            if running is task:
                return True
            running = running.parent
        return False

    # --- driving -----------------------------------------------------------------------------------

    def wake(self, task: Task[Any], token: int, value: Any) -> None:
        """What a task waited for is here; void if it has moved on since (by token)."""
        if task.token == token and not task.finished:
            self._leave_wait(task)
            self._resume(task, value, None)

    def wake_error(self, task: Task[Any], token: int, error: BaseException) -> None:
        """What a task waited for failed."""
        if task.token == token and not task.finished:
            self._leave_wait(task)
            self._resume(task, None, error)

    def _leave_wait(self, task: Task[Any]) -> None:
        """Take a task out of whatever it waits in; its wake-ups become void."""
        waits_for = task.waits_for
        task.token += 1
        if waits_for is None:
            return
        task.waits_for = None
        if type(waits_for) is Compute:
            self.withdraw_compute(task)
        else:
            task.state.waiting.pop(task, None)

    def _resume(self, task: Task[Any], value: Any, error: BaseException | None) -> None:
        """Run a task until it waits or ends."""
        coroutine = task.coroutine
        assert coroutine is not None
        before, self.current = self.current, task
        op: Any = None  # what a program awaits, be it an operation or not
        try:
            while True:
                if self.logging:
                    task.state.log.step(task.index, self.clock(), value, error)
                op = coroutine.send(value) if error is None else coroutine.throw(error)
                error = None
                try:
                    value = self.begin(task, op)
                except Exception as failed:
                    value, error = None, failed
                    continue
                if value is WAIT:
                    task.waits_for, task.since = op, self.clock()
                    return
        except StopIteration as returned:
            self._finish(task, returned.value, None)
        except Cancelled:
            task.cancelled = True
            self._finish(task, None, None)
        except Exception as failed:
            self._finish(task, None, failed, op)
        finally:
            self.current = before

    def _finish(self, task: Task[Any], result: Any, error: BaseException | None, last: Any = None) -> None:
        """A task has returned or failed; last: what it awaited last, if it failed after that."""
        task.finished, task.result, task.error = True, result, error
        task.coroutine = None
        for child in list(task.children):
            self._end_task(child)
        if task.parent is None:
            self._main_ended(task, last)
            return
        task.parent.children.remove(task)
        if error is not None:
            self.call_soon(self._surface, task.parent, error)
        else:
            self.wake_watchers(task)

    def _surface(self, parent: Task[Any], error: BaseException) -> None:
        """A child failed: its siblings end, and the error is raised where the parent waits."""
        if parent.finished:
            return
        for sibling in list(parent.children):
            self._end_task(sibling)
        self._leave_wait(parent)
        self._resume(parent, None, error)

    def _end_task(self, task: Task[Any]) -> None:
        """Cancel: Cancelled is raised at its await; a send is allowed then, another await raises again."""
        if task.finished:
            return
        for child in list(task.children):
            self._end_task(child)
        self._leave_wait(task)
        coroutine = task.coroutine
        task.cancelled = True
        before, self.current = self.current, task
        if self.logging:
            task.state.log.end(task.index, self.clock())
        try:
            if coroutine is not None:
                unwind(coroutine)
        except Exception as failed:
            task.error = failed
        finally:
            self.current = before
        task.finished, task.coroutine = True, None
        if task.parent is not None and task in task.parent.children:
            task.parent.children.remove(task)
        self.wake_watchers(task)

    # --- the end of a program ------------------------------------------------------------------------

    def _main_ended(self, task: Task[Any], last: Any) -> None:
        node = task.state.id
        self.awaited.discard(node)
        if task.error is None:
            self.results[node] = task.result
            self.node_ended(node)
        elif self.plan.nodes[node].role in self.plan.method.may_fail:
            self.observer.event(self.clock(), "failed", node, repr(task.error))
            self.node_failed(node)
        elif self.failure is None:
            operation = f"what follows {last.describe()}" if isinstance(last, Op) else "its program"
            self.failure = ProgramFailed(self.plan.name(node), self.clock(), operation, task.error)
            self.failure.__cause__ = task.error

    def node_ended(self, node: int) -> None:
        """A main program has returned."""

    def node_failed(self, node: int) -> None:
        """A main program has raised, and its method calls that a crash."""

    def all_ended(self) -> bool:
        """Whether every node whose return ends the run has returned."""
        return not self.awaited

    def waits(self) -> dict[str, str]:
        """What every hosted node that has not ended waits for, by its name."""
        found = {}
        for state in self.states.values():
            if state.main is not None and not state.main.finished:
                found[self.plan.name(state.id)] = _describe(state.main)
        return found

    # --- who waits for a task or a transfer ------------------------------------------------------------

    def watch(self, watched: Task[Any] | Transfer, task: Task[Any]) -> None:
        """Wake a task by wake_watchers; where it has watched before, that wait is over."""
        others = [entry for entry in watched.watchers if entry[0] is not task] if watched.watchers else []
        watched.watchers = (*others, (task, task.token))

    def wake_watchers(self, watched: Task[Any] | Transfer) -> None:
        for task, token in watched.watchers:
            self.call_soon(self._wake_watcher, task, token, watched)
        watched.watchers = ()

    def _wake_watcher(self, task: Task[Any], token: int, watched: Task[Any] | Transfer) -> None:
        if task.token != token or task.finished:
            return
        op = task.waits_for
        try:
            value = watched if type(op) is First else outcome_of(op)
        except Exception as error:
            self.wake_error(task, token, error)
            return
        if value is WAIT:
            self.watch(watched, task)
        else:
            self.wake(task, token, value)


async def _awaiting(op: Op[T]) -> T:
    return await op


def outcome_of(op: Op[Any] | None) -> Any:
    """The value of a Join, Left or Delivered, WAIT while there is none; raises what it failed with."""
    if isinstance(op, Join):
        return op.task.outcome() if op.task.finished else WAIT
    if isinstance(op, Left):
        return None if op.transfer.unsent == 0 or op.transfer.cancelled else WAIT
    assert isinstance(op, Delivered)
    transfer = op.transfer
    if transfer.cancelled:
        raise EdgeflError("this transfer was cancelled")
    if transfer.undeliverable:
        lost = ", ".join(map(str, sorted(transfer.undeliverable)))
        raise Unreachable(f"{type(transfer.message).__name__} to {lost}: gone")
    return None if transfer.unacknowledged == 0 else WAIT


def _describe(main: Task[Any]) -> str:
    waits = main.waits_for.describe() if main.waits_for is not None else "its turn"
    return f"{waits} since {main.since:.3f} s"
