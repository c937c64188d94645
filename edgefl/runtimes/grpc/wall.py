"""Node programs on the wall clock: time from an asyncio loop, work on a thread, messages by a transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from edgefl.learning.executors import Executor
from edgefl.nodes.handles import Task, Transfer
from edgefl.nodes.operations import Compute
from edgefl.nodes.plan import Observer, RunPlan
from edgefl.parameters import Vector
from edgefl.runtimes.grpc.lead import LastModel
from edgefl.runtimes.grpc.processor import Item, WallProcessor
from edgefl.runtimes.grpc.transport import Transport
from edgefl.runtimes.interpreter import Interpreter

log = logging.getLogger("edgefl.grpc")


class WallInterpreter(Interpreter):
    """Carries out the operations of the nodes that one process hosts.

    emulate: computing is slowed to each node's device profile. pool: the worker thread that trains, one of
    its own where None. life: of the hosted nodes. What connects the process sets `_loop`, `_start_s` and
    `_transport`.
    """

    _loop: asyncio.AbstractEventLoop
    _transport: Transport

    def __init__(
        self,
        plan: RunPlan,
        observer: Observer,
        executor: Executor | None,
        hosted: tuple[int, ...],
        *,
        emulate: bool,
        pool: ThreadPoolExecutor | None,
        life: int,
    ) -> None:
        super().__init__(plan, observer, hosted, extra_messages=(LastModel,))
        self._own_pool = pool is None
        self._pool = pool or ThreadPoolExecutor(1, thread_name_prefix="edgefl-work")
        self._over = asyncio.Event()
        self._last: dict[int, LastModel] = {}
        self._start_s = self._moved_s = 0.0
        for i, state in self.states.items():
            state.life = life
            state.processor = WallProcessor(
                plan.nodes[i], plan.learner, executor, self._pool, self, self._computed, emulate=emulate
            )

    # --- the clock -------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self._loop.time() - self._start_s

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_later(delay_s, self._guarded, call, args)

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon(self._guarded, call, args)

    def call_from_thread(self, call: Callable[..., None], *args: Any) -> None:
        """Call on the loop's thread; nothing happens once the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self._guarded, call, args)
        except RuntimeError:
            log.debug("a result came after the end of the run")

    def _guarded(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Every entry from outside: an error ends the run, and the end of the run is noticed."""
        if self._over.is_set():
            return
        try:
            self._moved_s = self._loop.time()
            call(*args)
        except BaseException as error:
            self.failure = self.failure or error
        if self.failure is not None or self.stop_reason is not None or self.all_ended():
            self._over.set()

    # --- operations -----------------------------------------------------------------------------------------

    def sent(self) -> int:
        """A message is on its way. Returns a number for it."""
        return 0

    def settled(self, number: int) -> None:
        """A message has arrived, was withdrawn, or will never arrive."""

    def publish(self, state: Any, parameters: Vector, step: int, part: str | None) -> None:
        now, last = self.clock(), self._last.get(state.id)
        reached_s = last.time_s if last is not None and last.step == step else now
        self._last[state.id] = LastModel(state.id, reached_s, step, parameters)
        self._pool.submit(self._publish, state.id, now, step, parameters, part)

    def _publish(self, node: int, now: float, step: int, parameters: Vector, part: str | None) -> None:
        """In the worker thread, since the observer may evaluate."""
        try:
            if self.observer.published(node, now, step, parameters, part):
                self.call_from_thread(self.stop, "target reached")
        except Exception as error:
            self.call_from_thread(self._fail_here, error)

    def _fail_here(self, error: Exception) -> None:
        raise error

    def begin_compute(self, task: Task[Any], token: int, op: Compute[Any]) -> None:
        task.state.processor.submit(task, token, op.work, op.share)

    def withdraw_compute(self, task: Task[Any]) -> None:
        task.state.processor.withdraw(task)

    def _computed(self, item: Item, result: object) -> None:
        self.computed(item.task, item.token, item.work, item.start_s, result)

    def begin_transfer(
        self, transfer: Transfer, receiver: int, payload_bytes: int, encoded_bytes: int, rate: float | None
    ) -> None:
        sender, began_s = transfer.state.id, self.clock()
        kind = type(transfer.message).__name__
        self.traffic.add(sender, receiver, kind, payload_bytes, encoded_bytes)
        if receiver in self.states:
            self.left(transfer)
            self.call_soon(self._deliver_here, transfer, receiver)
            return

        def left() -> None:
            self.observer.span(sender, "send", began_s, self.clock(), kind)
            self._guarded(self.left, (transfer,))

        number = self.sent()

        def delivered(error: Exception | None) -> None:
            self.settled(number)
            if error is None:
                self._guarded(self.acknowledged, (transfer,))
            else:
                self._guarded(self.undeliverable, (transfer, receiver))

        handle = self._transport.send(
            sender,
            receiver,
            transfer.message,
            rate_bytes_per_s=rate,
            on_left=left,
            on_delivered=delivered,
        )
        transfer.flows.append((handle, number))

    def _deliver_here(self, transfer: Transfer, receiver: int) -> None:
        if not transfer.cancelled:
            self.deliver(receiver, transfer.message)
            self.acknowledged(transfer)

    def withdraw_transfer(self, transfer: Transfer) -> None:
        for handle, number in transfer.flows:
            if handle.cancel():
                self.settled(number)
