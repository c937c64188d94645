"""The interpreter of operations: what a program's awaits mean, the same in every runtime.

It answers what programs ask and await, and matches messages with receives; driving the programs is in
`tasks`. What differs (time, transport, processors) is behind the methods that a runtime fills in; none of
them blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mypy_extensions import mypyc_attr

from edgefl.learning.poison import Poisoned
from edgefl.learning.work import Work
from edgefl.messages.base import Back, Gone, Message
from edgefl.messages.codec import LEAST_MAX_VALUES, Codec
from edgefl.nodes.handles import Task, Transfer
from edgefl.nodes.operations import Compute, Delivered, First, Join, Left, Receive, Save, Sleep
from edgefl.nodes.plan import Observer, RunPlan
from edgefl.nodes.traffic import Traffic
from edgefl.parameters import Vector
from edgefl.runtimes.inbox import is_stale, matches
from edgefl.runtimes.tasks import WAIT, NodeState, Tasks, outcome_of


@mypyc_attr(allow_interpreted_subclasses=True)
class Interpreter(Tasks):
    """Says what the operations of `hosted` nodes mean."""

    def __init__(
        self,
        plan: RunPlan,
        observer: Observer,
        hosted: tuple[int, ...],
        extra_messages: tuple[type[Message], ...] = (),
    ) -> None:
        super().__init__(plan, observer, hosted)
        self.codec = _codec(plan, extra_messages)
        self.traffic = Traffic()
        observer.begin(self.traffic)
        self.stop_reason: str | None = None
        self.dropped: Counter[str] = Counter()
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

    def begin_compute(self, task: Task[Any], token: int, op: Compute[Any]) -> None:
        """Queue work; when it is done, `self.wake(task, token, result)` or `self.wake_error(...)`."""
        raise NotImplementedError

    def begin_transfer(
        self, transfer: Transfer, receiver: int, payload_bytes: int, encoded_bytes: int, rate: float | None
    ) -> None:
        """Count in `traffic` and send to one receiver; then call `left(transfer)`, and `acknowledged` or
        `undeliverable`."""
        raise NotImplementedError

    def withdraw_transfer(self, transfer: Transfer) -> None:
        """Stop sending what has not left."""
        raise NotImplementedError

    def stop(self, reason: str) -> None:
        """Ask for the end of the run; the first reason counts."""
        if self.stop_reason is None:
            self.stop_reason = reason

    # --- the Port: what a Node asks without awaiting -----------------------------------------------

    def now(self, state: NodeState) -> float:
        return self.clock() if self.replay is None else self.replay.time_s

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
        payload, encoded = self.codec.sizes(stamped)
        self._check_receivers(stamped, receivers)
        for receiver in receivers:
            if receiver in state.known_dead:
                self.left(transfer)
                self.undeliverable(transfer, receiver)
            elif receiver == state.id:
                self.left(transfer)
                self.call_soon(self._deliver_home, transfer)
            else:
                self.begin_transfer(transfer, receiver, payload, encoded, rate_bytes_per_s)
        return transfer

    def _check_receivers(self, message: Message, receivers: tuple[int, ...]) -> None:
        last = len(self.plan.nodes) - 1
        for receiver in receivers:
            if not 0 <= receiver <= last:
                raise ValueError(
                    f"{type(message).__name__} to node {receiver}: the fleet has nodes 0 to {last}"
                )

    def cancel_transfer(self, transfer: Transfer) -> None:
        if self.replay is None and not transfer.cancelled and (transfer.unsent or transfer.unacknowledged):
            transfer.cancelled = True
            self.withdraw_transfer(transfer)
            self.wake_watchers(transfer)

    def take(self, state: NodeState, pattern: Receive) -> list[Message]:
        return self.observe(state, lambda: state.inbox.take(pattern))

    def living(self, state: NodeState, ids: Sequence[int]) -> tuple[int, ...]:
        dead = state.known_dead
        return self.observe(state, lambda: tuple([j for j in ids if j not in dead] if dead else ids))

    def publish(self, state: NodeState, parameters: Vector, step: int, part: str | None) -> None:
        if self.replay is None and self.observer.published(state.id, self.clock(), step, parameters, part):
            self.stop("target reached")

    def record(self, state: NodeState, metrics: dict[str, float]) -> None:
        if self.replay is None:
            self.observer.recorded(state.id, self.clock(), metrics)

    def note(self, state: NodeState, kind: str, detail: str) -> None:
        if self.replay is None:
            self.observer.event(self.clock(), kind, state.id, detail)

    # --- operations -------------------------------------------------------------------------------

    def begin(self, task: Task[Any], op: Any) -> Any:
        begin = self._begin.get(type(op))
        if begin is None:
            raise TypeError(f"a program awaits operations of its node, not {op!r}")
        return begin(task, op)

    def _begin_receive(self, task: Task[Any], op: Receive) -> Any:
        if self.logging and task.parent is None and not task.children and self._is_stateless(task.state):
            task.state.log.restart(self.clock(), task.state.workload)
        message = self._at_hand(task.state, op)
        if message is not None:
            return message
        task.state.waiting[task] = (op,)
        if op.timeout_s is not None:
            self.call_later(max(0.0, op.timeout_s), self.wake, task, task.token, None)
        return WAIT

    def _at_hand(self, state: NodeState, op: Receive) -> Message | None:
        if state.known_dead and op.senders is not None and Gone in op.kinds:
            dead = state.known_dead.intersection(op.senders)
            if dead:
                j = min(dead)
                message = state.inbox.get(Receive(op.kinds, j, None, op.fields))
                return message if message is not None else Gone().stamped(j, 0)
        return state.inbox.get(op)

    def _begin_compute(self, task: Task[Any], op: Compute[Any]) -> Any:
        poison = self.plan.nodes[task.state.id].poison
        done = op if poison is None else Compute(Poisoned(op.work, poison, task.state.id), op.share)
        self.begin_compute(task, task.token, done)
        return WAIT

    def _begin_sleep(self, task: Task[Any], op: Sleep) -> Any:
        self.call_later(op.seconds, self.wake, task, task.token, None)
        return WAIT

    def _begin_join(self, task: Task[Any], op: Join[Any]) -> Any:
        if op.task.finished:
            return op.task.outcome()
        self.watch(op.task, task)
        return WAIT

    def _begin_left(self, task: Task[Any], op: Left) -> Any:
        return self._watch(task, op.transfer, outcome_of(op))

    def _begin_delivered(self, task: Task[Any], op: Delivered) -> Any:
        return self._watch(task, op.transfer, outcome_of(op))

    def _watch(self, task: Task[Any], watched: Transfer, value: Any) -> Any:
        if value is WAIT:
            self.watch(watched, task)
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
                self.watch(one, task)
        if receives:
            task.state.waiting[task] = tuple(receives)
        if timeouts:
            self.call_later(max(0.0, min(timeouts)), self.wake, task, task.token, None)
        return WAIT

    def _begin_save(self, task: Task[Any], op: Save) -> Any:
        task.state.saved = op.state
        if self.logging and task.parent is None and not task.children:
            task.state.log.clear(op.state, task.state.workload)
        return None

    def _is_stateless(self, state: NodeState) -> bool:
        return self.plan.nodes[state.id].role in self.plan.method.stateless

    def computed(self, task: Task[Any], token: int, work: Work, start_s: float, result: object) -> None:
        """Work is done: its task goes on with the result, or with the error that it raised."""
        self.observer.span(task.state.id, "compute", start_s, self.clock(), type(work).__name__)
        if isinstance(result, Exception):
            self.wake_error(task, token, result)
        else:
            self.wake(task, token, result)

    # --- messages and peers -------------------------------------------------------------------------

    def deliver(self, node: int, message: Message) -> None:
        """A message has arrived at a node."""
        self.hand(self.states[node], message)

    def hand(self, state: NodeState, message: Message) -> None:
        """A message has arrived: to whoever waits for it, else into the inbox."""
        if not state.alive:
            return
        if message.once_by is not None and state.inbox.repeated(message):
            self.dropped["repeated"] += 1
            return
        kind = type(message)
        for task, receives in state.waiting.items():
            for pattern in receives:
                if not issubclass(kind, pattern.kinds):
                    continue
                if matches(pattern, message):
                    self.wake(task, task.token, message)
                    return
                if is_stale(pattern, message):
                    state.inbox.count_stale(kind, 1)
                    return
        state.inbox.put(message)

    def stale(self) -> dict[str, int]:
        """Messages that came for an earlier round, by kind name."""
        counts: Counter[str] = Counter()
        for state in self.states.values():
            counts.update(state.inbox.stale)
        return dict(counts)

    def _deliver_home(self, transfer: Transfer) -> None:
        if not transfer.cancelled:
            self.deliver(transfer.state.id, transfer.message)
            self.acknowledged(transfer)

    def left(self, transfer: Transfer) -> None:
        """One receiver's copy has left the uplink."""
        transfer.unsent -= 1
        if transfer.unsent == 0 and transfer.watchers:
            self.wake_watchers(transfer)

    def acknowledged(self, transfer: Transfer) -> None:
        """One receiver has it."""
        transfer.unacknowledged -= 1
        if transfer.unacknowledged == 0 and transfer.watchers:
            self.wake_watchers(transfer)

    def undeliverable(self, transfer: Transfer, receiver: int) -> None:
        """One receiver will never have it."""
        transfer.undeliverable += (receiver,)
        self.acknowledged(transfer)

    def peer_gone(self, node: int) -> None:
        """The hosted nodes hear that a node is dead."""
        for state in self.states.values():
            if state.alive and state.id != node and node not in state.known_dead:
                state.known_dead.add(node)
                state.inbox.forget(Back, node)
                self._tell_gone(state, Gone().stamped(node, 0))

    def _tell_gone(self, state: NodeState, gone: Gone) -> None:
        """Wake all tasks that wait for word of this node by name; else as any message."""
        waiting = [
            (task, task.token)
            for task, receives in state.waiting.items()
            if any(Gone in p.kinds and p.senders is not None and gone.sender in p.senders for p in receives)
        ]
        if not waiting:
            self.deliver(state.id, gone)
        for task, token in waiting:
            self.wake(task, token, gone)

    def peer_back(self, node: int, life: int) -> None:
        """The hosted nodes hear that a node has returned."""
        for state in self.states.values():
            if state.alive and state.id != node and node in state.known_dead:
                state.known_dead.discard(node)
                state.inbox.forget(Gone, node)
                self.deliver(state.id, Back().stamped(node, life))


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
