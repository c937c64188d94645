"""The interpreter of operations: what a program's awaits mean, the same in every runtime.

It drives coroutines by `send`, keeps their tasks in families, and matches messages with receives. What
differs (time, transport, processors) is behind the methods that a runtime fills in; none of them blocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from edgefl.errors import Cancelled, EdgeflError, ProgramFailed, Unreachable
from edgefl.learning.poison import Poisoned
from edgefl.messages.base import Back, Gone, Message, payload_bytes
from edgefl.messages.codec import LEAST_MAX_VALUES, Codec
from edgefl.nodes.handles import Task, Transfer
from edgefl.nodes.node import Node
from edgefl.nodes.operations import Compute, Delivered, First, Join, Left, Op, Receive, Save, Sleep
from edgefl.nodes.plan import Observer, RunPlan
from edgefl.nodes.traffic import Traffic
from edgefl.parameters import Vector
from edgefl.runtimes.inbox import Inbox, is_stale, matches
from edgefl.runtimes.log import Log, Replay, unwind

T = TypeVar("T")
_WAIT: Any = object()  # a handler's answer: not ready, the task is parked


class NodeState:
    """One node as the runtime knows it. known_dead: the peers that it has heard are gone."""

    __slots__ = (
        "alive", "id", "inbox", "known_dead", "life", "log", "main", "num_tasks",
        "port", "processor", "saved", "waiting",
    )  # fmt: skip

    def __init__(self, port: Interpreter, node: int) -> None:
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
        self.log = Log(self.saved)


class Interpreter:
    """Drives the programs of `hosted` nodes of a plan."""

    def __init__(
        self,
        plan: RunPlan,
        observer: Observer,
        hosted: tuple[int, ...],
        extra_messages: tuple[type[Message], ...] = (),
    ) -> None:
        self.plan, self.observer = plan, observer
        self.states = {i: NodeState(self, i) for i in hosted}
        self.codec = _codec(plan, extra_messages)
        self.traffic = Traffic()
        observer.begin(self.traffic)
        self.current: Task[Any] | None = None
        self.results: dict[int, Any] = {}
        self.awaited = {i for role in plan.method.ends_with for i in plan.ids(role)}
        """Nodes whose return ends the run and that have not returned, nor died for good."""
        self.failure: BaseException | None = None
        self.stop_reason: str | None = None
        self.dropped: Counter[str] = Counter()
        self.logging = False
        """Whether the programs' logs are kept, so that a checkpoint can be taken."""
        self.replay: Replay | None = None
        """While a restored program is brought to where it was; nothing that it asks for is done again."""
        self._soon: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._begin: dict[type, Callable[[Task[Any], Any], Any]] = {
            Receive: self._begin_receive,
            Compute: self._begin_compute,
            Join: self._begin_join,
            First: self._begin_first,
            Left: self._begin_left,
            Delivered: self._begin_delivered,
            Sleep: self._begin_sleep,
            Save: self._begin_save,
        }

    # --- what a runtime fills in -------------------------------------------------------------

    def clock(self) -> float:
        """Seconds since the run began."""
        raise NotImplementedError

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call at a later time; a wake-up that has become void is recognised by its token."""
        raise NotImplementedError

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        """Call at this same time, after what is going on, in order."""
        raise NotImplementedError

    def begin_compute(self, task: Task[Any], token: int, op: Compute[Any]) -> None:
        """Queue work; when it is done, `self.wake(task, token, result)` or `self.wake_error(...)`."""
        raise NotImplementedError

    def withdraw_compute(self, task: Task[Any]) -> None:
        """The task no longer waits for its work."""
        raise NotImplementedError

    def begin_transfer(
        self, transfer: Transfer, receiver: int, encoded_bytes: int, rate: float | None
    ) -> None:
        """Send to one receiver; then call `left(transfer)` and `acknowledged` or `undeliverable`."""
        raise NotImplementedError

    def withdraw_transfer(self, transfer: Transfer) -> None:
        """Stop sending what has not left."""
        raise NotImplementedError

    # --- lives ---------------------------------------------------------------------------------

    def begin_life(self, node: int) -> None:
        """Start a node's program, from its saved state if it has one."""
        state = self.states[node]
        role = self.plan.nodes[node].role
        program = self.plan.method.roles[role]
        view = Node(self.plan, node, state.life, state, state.saved)
        task: Task[Any] = Task(state, program(view), None, 0)
        state.main, state.num_tasks = task, 1
        self.call_soon(self._resume, task, task.token, None, None)

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

    def stop(self, reason: str) -> None:
        """Ask for the end of the run; the first reason counts."""
        if self.stop_reason is None:
            self.stop_reason = reason

    # --- the Port: what a Node asks without awaiting -----------------------------------------------

    def now(self, state: NodeState) -> float:
        return self.clock() if self.replay is None else self.replay.time_s

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
        self.call_soon(self._resume, task, task.token, None, None)
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

    def send(
        self, state: NodeState, receivers: tuple[int, ...], message: Message, rate_bytes_per_s: float | None
    ) -> Transfer:
        if self.replay is not None:
            return self.replay.seen()  # type: ignore[no-any-return]
        transfer = Transfer(state, message, receivers, self.clock())
        if self.logging:
            state.log.saw(transfer)
        if not state.alive:
            transfer.unsent = transfer.unacknowledged = 0
            return transfer
        stamped = message.stamped(state.id, state.life)
        transfer.message = stamped
        encoded = self.codec.encoded_size(stamped)
        payload = payload_bytes(stamped)
        kind = type(stamped).__name__
        for receiver in receivers:
            if not 0 <= receiver < len(self.plan.nodes):
                raise ValueError(
                    f"{kind} to node {receiver}: the fleet has nodes 0 to {len(self.plan.nodes) - 1}"
                )
        for receiver in receivers:
            if receiver in state.known_dead:
                self.left(transfer)
                self.undeliverable(transfer, receiver)
            elif receiver == state.id:
                self.left(transfer)
                self.call_soon(self._deliver_home, transfer)
            else:
                self.traffic.add(state.id, receiver, kind, payload, encoded)
                self.begin_transfer(transfer, receiver, encoded, rate_bytes_per_s)
        return transfer

    def cancel_transfer(self, transfer: Transfer) -> None:
        if self.replay is None and not transfer.cancelled and (transfer.unsent or transfer.unacknowledged):
            transfer.cancelled = True
            self.withdraw_transfer(transfer)
            self._wake_watchers(transfer)

    def take(self, state: NodeState, pattern: Receive) -> list[Message]:
        return self.observe(state, lambda: state.inbox.take(pattern))

    def alive(self, state: NodeState, node: int) -> bool:
        return self.observe(state, lambda: node not in state.known_dead)

    def publish(self, state: NodeState, parameters: Vector, step: int, part: str | None) -> None:
        if self.replay is None and self.observer.published(state.id, self.clock(), step, parameters, part):
            self.stop("target reached")

    def record(self, state: NodeState, metrics: dict[str, float]) -> None:
        if self.replay is None:
            self.observer.recorded(state.id, self.clock(), metrics)

    def note(self, state: NodeState, kind: str, detail: str) -> None:
        if self.replay is None:
            self.observer.event(self.clock(), kind, state.id, detail)

    # --- driving tasks ---------------------------------------------------------------------------

    def wake(self, task: Task[Any], token: int, value: Any) -> None:
        """What a task waited for is here; void if it has moved on since (by token)."""
        if task.token == token and not task.finished:
            self._leave_wait(task)
            self._resume(task, task.token, value, None)

    def wake_error(self, task: Task[Any], token: int, error: BaseException) -> None:
        """What a task waited for failed."""
        if task.token == token and not task.finished:
            self._leave_wait(task)
            self._resume(task, task.token, None, error)

    def _leave_wait(self, task: Task[Any]) -> None:
        """Take a task out of whatever it waits in; its wake-ups become void."""
        waits_for = task.waits_for
        task.token += 1
        if waits_for is None:
            return
        task.waits_for = None
        task.state.waiting.pop(task, None)
        if type(waits_for) is Compute:
            self.withdraw_compute(task)

    def _resume(self, task: Task[Any], token: int, value: Any, error: BaseException | None) -> None:
        """Run a task until it waits or ends."""
        if task.finished or task.token != token:
            return
        coroutine = task.coroutine
        assert coroutine is not None
        before, self.current = self.current, task
        try:
            while True:
                if self.logging:
                    task.state.log.step(task.index, self.clock(), value, error)
                op = coroutine.send(value) if error is None else coroutine.throw(error)
                error = None
                begin = self._begin.get(type(op))
                try:
                    if begin is None:
                        raise TypeError(f"a program awaits operations of its node, not {op!r}")
                    value = begin(task, op)
                except Exception as failed:
                    value, error = None, failed
                    continue
                if value is _WAIT:
                    task.waits_for, task.since = op, self.clock()
                    return
        except StopIteration as returned:
            self._finish(task, returned.value, None)
        except Cancelled:
            task.cancelled = True
            self._finish(task, None, None)
        except Exception as failed:
            self._finish(task, None, failed)
        finally:
            self.current = before

    def _finish(self, task: Task[Any], result: Any, error: BaseException | None) -> None:
        task.finished, task.result, task.error = True, result, error
        task.coroutine = None
        for child in list(task.children):
            self._end_task(child)
        if task.parent is None:
            self._main_ended(task)
            return
        task.parent.children.remove(task)
        if error is not None:
            self.call_soon(self._surface, task.parent, error)
        else:
            self._wake_watchers(task)

    def _surface(self, parent: Task[Any], error: BaseException) -> None:
        """A child failed: its siblings end, and the error is raised where the parent waits."""
        if parent.finished:
            return
        for sibling in list(parent.children):
            self._end_task(sibling)
        self._leave_wait(parent)
        self._resume(parent, parent.token, None, error)

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
        self._wake_watchers(task)

    def _main_ended(self, task: Task[Any]) -> None:
        node = task.state.id
        self.awaited.discard(node)
        if task.error is None:
            self.results[node] = task.result
            self.node_ended(node)
        elif self.plan.nodes[node].role in self.plan.method.may_fail:
            self.observer.event(self.clock(), "failed", node, repr(task.error))
            self.node_failed(node)
        elif self.failure is None:
            operation = getattr(task.error, "__edgefl_operation__", "its program")
            self.failure = ProgramFailed(self.plan.name(node), self.clock(), operation, task.error)
            self.failure.__cause__ = task.error

    def node_ended(self, node: int) -> None:
        """A main program has returned."""

    def node_failed(self, node: int) -> None:
        """A main program has raised, and its method calls that a crash."""

    def all_ended(self) -> bool:
        """Whether every node whose return ends the run has returned."""
        return not self.awaited

    def _is_running(self, task: Task[Any]) -> bool:
        running = self.current
        while running is not None:
            if running is task:
                return True
            running = running.parent
        return False

    def _wake_watchers(self, watched: Task[Any] | Transfer) -> None:
        for task, token in watched.watchers:
            self.call_soon(self._wake_watcher, task, token, watched)
        watched.watchers.clear()

    def _wake_watcher(self, task: Task[Any], token: int, watched: Task[Any] | Transfer) -> None:
        if task.token != token or task.finished:
            return
        op = task.waits_for
        try:
            value = watched if type(op) is First else _outcome(op)
        except Exception as error:
            self.wake_error(task, token, error)
            return
        if value is _WAIT:
            watched.watchers.append((task, token))
        else:
            self.wake(task, token, value)

    # --- operations -------------------------------------------------------------------------------

    def _begin_receive(self, task: Task[Any], op: Receive) -> Any:
        if self.logging and task.parent is None and not task.children and self._is_stateless(task.state):
            task.state.log.restart(self.clock())
        message = self._at_hand(task.state, op)
        if message is not None:
            return message
        task.state.waiting[task] = (op,)
        if op.timeout_s is not None:
            self.call_later(max(0.0, op.timeout_s), self.wake, task, task.token, None)
        return _WAIT

    def _at_hand(self, state: NodeState, op: Receive) -> Message | None:
        if Gone in op.kinds and op.senders is not None:
            for j in sorted(op.senders):
                if j in state.known_dead:
                    message = state.inbox.get(Receive(op.kinds, j, None, op.fields))
                    return message if message is not None else Gone().stamped(j, 0)
        return state.inbox.get(op)

    def _begin_compute(self, task: Task[Any], op: Compute[Any]) -> Any:
        poison = self.plan.nodes[task.state.id].poison
        done = op if poison is None else Compute[Any](Poisoned(op.work, poison, task.state.id), op.share)
        self.begin_compute(task, task.token, done)
        return _WAIT

    def _begin_sleep(self, task: Task[Any], op: Sleep) -> Any:
        self.call_later(op.seconds, self.wake, task, task.token, None)
        return _WAIT

    def _begin_join(self, task: Task[Any], op: Join[Any]) -> Any:
        if op.task.finished:
            return op.task.outcome()
        op.task.watchers.append((task, task.token))
        return _WAIT

    def _begin_left(self, task: Task[Any], op: Left) -> Any:
        return self._watch(task, op.transfer, _outcome(op))

    def _begin_delivered(self, task: Task[Any], op: Delivered) -> Any:
        return self._watch(task, op.transfer, _outcome(op))

    def _watch(self, task: Task[Any], watched: Transfer, value: Any) -> Any:
        if value is _WAIT:
            watched.watchers.append((task, task.token))
        return value

    def _begin_first(self, task: Task[Any], op: First) -> Any:
        receives: list[Receive] = []
        timeouts = [] if op.timeout_s is None else [op.timeout_s]
        for one in op.ops:
            if isinstance(one, Receive):
                message = self._at_hand(task.state, one)
                if message is not None:
                    return message
                receives.append(one)
                if one.timeout_s is not None:
                    timeouts.append(one.timeout_s)
            elif isinstance(one, Task):
                if one.finished:
                    return one
            elif isinstance(one, Transfer):
                if one.unsent == 0 or one.cancelled:
                    return one
            else:
                raise TypeError(f"first() takes receives, tasks and transfers; start() {one!r} first")
        for one in op.ops:
            if isinstance(one, Task | Transfer):
                one.watchers.append((task, task.token))
        if receives:
            task.state.waiting[task] = tuple(receives)
        if timeouts:
            self.call_later(max(0.0, min(timeouts)), self.wake, task, task.token, None)
        return _WAIT

    def _begin_save(self, task: Task[Any], op: Save) -> Any:
        task.state.saved = op.state
        if self.logging and task.parent is None and not task.children:
            task.state.log.clear(op.state)
        return None

    def _is_stateless(self, state: NodeState) -> bool:
        return self.plan.nodes[state.id].role in self.plan.method.stateless

    # --- messages and peers -------------------------------------------------------------------------

    def deliver(self, node: int, message: Message) -> None:
        """A message has arrived: to whoever waits for it, else into the inbox."""
        state = self.states[node]
        if not state.alive:
            return
        if message.once_by is not None and state.inbox.repeated(message):
            self.dropped["repeated"] += 1
            return
        for task, receives in state.waiting.items():
            for pattern in receives:
                if matches(pattern, message):
                    self.wake(task, task.token, message)
                    return
                if is_stale(pattern, message):
                    state.inbox.stale[type(message).__name__] += 1
                    return
        state.inbox.put(message)

    def _deliver_home(self, transfer: Transfer) -> None:
        if not transfer.cancelled:
            self.deliver(transfer.state.id, transfer.message)
            self.acknowledged(transfer)

    def left(self, transfer: Transfer) -> None:
        """One receiver's copy has left the uplink."""
        transfer.unsent -= 1
        if transfer.unsent == 0 and transfer.watchers:
            self._wake_watchers(transfer)

    def acknowledged(self, transfer: Transfer) -> None:
        """One receiver has it."""
        transfer.unacknowledged -= 1
        if transfer.unacknowledged == 0 and transfer.watchers:
            self._wake_watchers(transfer)

    def undeliverable(self, transfer: Transfer, receiver: int) -> None:
        """One receiver will never have it."""
        transfer.undeliverable.append(receiver)
        self.acknowledged(transfer)

    def peer_gone(self, node: int) -> None:
        """The hosted nodes hear that a node is dead."""
        for state in self.states.values():
            if state.alive and state.id != node and node not in state.known_dead:
                state.known_dead.add(node)
                state.inbox.forget(Back, node)
                self.deliver(state.id, Gone().stamped(node, 0))

    def peer_back(self, node: int, life: int) -> None:
        """The hosted nodes hear that a node has returned."""
        for state in self.states.values():
            if state.alive and state.id != node and node in state.known_dead:
                state.known_dead.discard(node)
                state.inbox.forget(Gone, node)
                self.deliver(state.id, Back().stamped(node, life))

    def waits(self) -> dict[str, str]:
        """What every hosted node that has not ended waits for, by its name."""
        found = {}
        for state in self.states.values():
            if state.main is not None and not state.main.finished:
                found[self.plan.name(state.id)] = _describe(state.main)
        return found


def _codec(plan: RunPlan, extra: tuple[type[Message], ...]) -> Codec:
    """The codec of a run: it knows the method's kinds, the layouts of the model and of its stages, and
    takes tensors as large as the model four times over or a batch at any cut."""
    kinds = (*plan.method.messages, *extra)
    if plan.learner is None:
        return Codec(kinds)
    model = plan.learner.model
    last = len(model.blocks)
    stages = [model.stage(a, b) for a in range(last) for b in range(a + 1, last + 1)]
    batch = max(node.workload.batch_size for node in plan.nodes)
    widest = max(block.output_bytes // 4 for block in model.block_counts)
    most = max(4 * model.layout.size, batch * widest, LEAST_MAX_VALUES)
    return Codec(kinds, dict.fromkeys(stage.layout for stage in stages), max_values=most)


async def _awaiting(op: Op[T]) -> T:
    return await op


def _outcome(op: Op[Any] | None) -> Any:
    """The value of a Join, Left or Delivered, _WAIT while there is none; raises what it failed with."""
    if isinstance(op, Join):
        return op.task.outcome() if op.task.finished else _WAIT
    if isinstance(op, Left):
        return None if op.transfer.unsent == 0 or op.transfer.cancelled else _WAIT
    assert isinstance(op, Delivered)
    transfer = op.transfer
    if transfer.cancelled:
        raise EdgeflError("this transfer was cancelled")
    if transfer.undeliverable:
        lost = ", ".join(map(str, sorted(transfer.undeliverable)))
        raise Unreachable(f"{type(transfer.message).__name__} to {lost}: gone")
    return None if transfer.unacknowledged == 0 else _WAIT


def _describe(main: Task[Any]) -> str:
    waits = main.waits_for.describe() if main.waits_for is not None else "its turn"
    return f"{waits} since {main.since:.3f} s"
