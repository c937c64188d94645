"""The virtual runtime: node programs on a virtual clock, exactly repeatable."""

from __future__ import annotations

import gc
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any, Protocol

from mypy_extensions import mypyc_attr

from edgefl.devices.energy.model import modelled_joules
from edgefl.errors import Stuck
from edgefl.learning.executors import Executor
from edgefl.messages.base import Message, payload_bytes
from edgefl.nodes.handles import Task, Transfer
from edgefl.nodes.operations import Compute
from edgefl.nodes.plan import Crash, Observer, RunPlan
from edgefl.parameters.moves import lent
from edgefl.runtimes.interpreter import Interpreter
from edgefl.runtimes.outcome import Outcome
from edgefl.runtimes.tasks import NodeState
from edgefl.runtimes.virtual.links import Flow, Lane, make_links
from edgefl.runtimes.virtual.processor import Item, Jitter, Processor, Workshop
from edgefl.runtimes.virtual.transit import Draws


class Checkpointer(Protocol):
    """Who keeps checkpoints, and decides when one is due; that changes nothing in the run."""

    def due(self) -> bool: ...
    def write(self, runtime: VirtualRuntime) -> None: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class VirtualRuntime(Interpreter):
    """Runs a plan in virtual time. Events order by (time, sequence); nothing depends on the wall clock.

    checkpointer: asked between events; with one, the programs' logs are kept.
    """

    def __init__(
        self,
        plan: RunPlan,
        observer: Observer,
        executor: Executor | None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        super().__init__(plan, observer, tuple(range(len(plan.nodes))))
        self.executor, self._checkpointer = executor, checkpointer
        self.logging = checkpointer is not None
        self._num_ticks = 0
        self._time_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        """(time, sequence, call, arguments); a single one, as most have it, stands there itself."""
        self._soon: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._last: list[Callable[..., None]] = []
        self._sequence = 0
        self.num_events = 0
        self._num_aside = 0
        """Entries of the heap that move no program by themselves."""
        self._flat: set[int] = set()
        """Nodes whose battery has run flat."""
        self._links = make_links(plan.network, self, self._left)
        self._may_overtake = plan.network.link_model == "fifo" or any(a.jitter for a in plan.network.access)
        self._lanes: list[dict[tuple[int, type[Message]], Lane]] = [{} for _ in plan.nodes]
        """Of each sender, by receiver and kind."""
        self._leaving: list[dict[Transfer, None]] = [{} for _ in plan.nodes]
        """What each node is sending, in order; a transfer's flows that have left or ended are `stopped`."""
        self._draws: dict[tuple[str, int], Draws] = {}
        self._arrival = self._arrive  # bound once, for all events
        self._access = [(a.latency_s, a.jitter, a.loss) for a in plan.network.access]
        self._copying_rates = [node.profile.memory_bytes_per_s for node in plan.nodes]
        self._partitions = plan.faults.partitions
        self._workshop = Workshop(executor)
        for i, spec in enumerate(plan.nodes):
            jitter = Jitter(plan.faults.compute_jitter, plan.seed, i)
            self.states[i].processor = Processor(
                i, spec, plan.learner, self._workshop, jitter, self.call_later, self._computed
            )

    # --- the clock ---------------------------------------------------------------------------------

    def clock(self) -> float:
        return self._time_s

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self._sequence += 1
        alone = len(args) == 1 and not isinstance(args[0], tuple)
        due = self._time_s + delay_s
        heappush(self._heap, (due, self._sequence, call, args[0] if alone else args))

    def call_aside(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """As call_later, for what moves no program by itself: a run does not go on for its sake."""
        self._num_aside += 1
        self.call_later(delay_s, self._aside, call, args)

    def _aside(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._num_aside -= 1
        call(*args)

    def _arrive_at(self, time_s: float, flow: Flow) -> None:
        """Let a flow arrive at this time, to the bit: what is due at one instant keeps its order."""
        self._sequence += 1
        heappush(self._heap, (time_s, self._sequence, self._arrival, flow))

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self._soon.append((call, args))

    def call_last(self, call: Callable[..., None]) -> None:
        """Call at this same time, once nothing else happens at it."""
        self._last.append(call)

    def run(self) -> Outcome:
        """Run to the end. Raises Stuck when nobody can move any more, ProgramFailed for a program's error."""
        threads = None if self.executor is None else self.executor.threads
        with _rare_collections(len(self.states)), _quick_switches(), lent(threads):
            return self._run()

    def _run(self) -> Outcome:
        try:
            if all(state.main is None for state in self.states.values()):  # not restored from a checkpoint
                for i in self.states:
                    self.begin_life(i)
                for crash in self.plan.faults.crashes:
                    self.call_later(crash.at_s, self._crash, crash)
                self._links.begin()
                for i, spec in enumerate(self.plan.nodes):
                    if spec.battery_j is not None:
                        self._drain(i)
            self._run_events()
        finally:
            self.end_all()
        return self._outcome()

    def _run_events(self) -> None:
        every = self.observer.every_s
        next_tick = math.inf if every is None else (self._num_ticks + 1) * every
        limit = self.plan.time_s if self.plan.time_s is not None else math.inf
        soon, heap, awaited, checkpointer = self._soon, self._heap, self.awaited, self._checkpointer
        while True:
            while soon:
                call, args = soon.popleft()
                call(*args)
            if self.failure is not None:
                raise self.failure
            if self.stop_reason is not None or not awaited:
                return
            if checkpointer is not None and checkpointer.due():
                checkpointer.write(self)
            if self._last and (not heap or heap[0][0] > self._time_s):
                last, self._last = self._last, []
                for call in last:
                    call()
                continue
            if len(heap) <= self._num_aside:
                raise Stuck(self._time_s, self.waits())
            time_s = heap[0][0]
            if next_tick <= time_s and next_tick <= limit:
                self._time_s = next_tick
                self._num_ticks += 1
                next_tick = math.inf if every is None else (self._num_ticks + 1) * every
                if self.observer.tick(self._time_s):
                    self.stop("target reached")
                continue
            if time_s > limit:
                self._time_s = limit
                self.stop("time limit")
                return
            _, _, call, given = heappop(heap)
            self._time_s = time_s
            self.num_events += 1
            if isinstance(given, tuple):
                call(*given)
            else:
                call(given)

    def _outcome(self) -> Outcome:
        return Outcome(
            status="finished" if self.stop_reason is None else "stopped",
            reason=self.stop_reason or "the method ended",
            time_s=self._time_s,
            results=self.results,
            traffic=self.traffic,
            busy_s={i: state.processor.busy_s for i, state in self.states.items()},
            stale=self.stale(),
            dropped=dict(self.dropped),
            num_events=self.num_events,
        )

    # --- processors ----------------------------------------------------------------------------------

    def begin_compute(self, task: Task[Any], token: int, op: Compute[Any]) -> None:
        task.state.processor.submit(task, token, op.work, op.share, self._time_s)

    def withdraw_compute(self, task: Task[Any]) -> None:
        task.state.processor.withdraw(task, self._time_s)

    def finish_work(self) -> None:
        """Wait for what has been begun before its time, so that all there is can be stored."""
        self._workshop.finish()

    def _result_of(self, item: Item) -> object:
        return self._workshop.result(item)

    def _computed(self, item: Item) -> None:
        self.computed(item.task, item.token, item.work, item.start_s, self._result_of(item))

    # --- the network -----------------------------------------------------------------------------------

    def begin_transfer(
        self, transfer: Transfer, receiver: int, payload_bytes: int, encoded_bytes: int, rate: float | None
    ) -> None:
        sender, kind = transfer.state.id, type(transfer.message)
        lane = self._lanes[sender].get((receiver, kind))
        if lane is None:
            lane = self._open(sender, receiver, kind)
        row = lane.row
        row[0] += 1
        row[1] += payload_bytes
        row[2] += encoded_bytes
        # What is lost on the way is sent again, but for datagrams.
        size = float(encoded_bytes) if kind.lossy else encoded_bytes / (1 - lane.loss)
        flow = Flow(transfer, lane, encoded_bytes, size, rate)
        if not transfer.flows:
            self._leaving[sender][transfer] = None
        transfer.flows.append(flow)
        if not self._links.keeps_order:
            if lane.busy:  # in order: the next starts when the one before has left
                lane.waiting.append(flow)
                return
            lane.busy = True
        self._links.start(flow)

    def _open(self, sender: int, receiver: int, kind: type[Message]) -> Lane:
        """The lane of the first message of a kind from one node to another."""
        ends = self._access[sender], self._access[receiver]
        lane = self._lanes[sender][receiver, kind] = Lane(
            sender,
            receiver,
            self.states[receiver],
            kind,
            self.plan.network.cap(sender, receiver),
            self.traffic.row(sender, receiver, kind.__name__),
            ends,
            self._copying_rates[receiver],
            self._draws_of("latency", sender) if any(jitter for _, jitter, _ in ends) else None,
        )
        return lane

    def _draws_of(self, purpose: str, node: int) -> Draws:
        draws = self._draws.get((purpose, node))
        if draws is None:
            draws = self._draws[purpose, node] = Draws(self.plan.seed, purpose, node)
        return draws

    def withdraw_transfer(self, transfer: Transfer) -> None:
        for flow in transfer.flows:
            self._links_off(flow)
        self._forget(transfer)

    def _forget(self, transfer: Transfer) -> None:
        """Nothing of a transfer is to leave any more: it and its flows part, or they would wait for the
        collector of cycles."""
        if transfer.flows:
            del self._leaving[transfer.state.id][transfer]
            transfer.flows.clear()

    def _links_off(self, flow: Flow) -> None:
        lane = flow.lane
        if flow.stopped:
            return
        if flow in lane.waiting:
            lane.waiting.remove(flow)
            flow.stopped = True
        else:
            self._links.stop(flow)
            if flow.rate > 0:  # it was on its way
                self.observer.span(lane.sender, "send", flow.start_s, self._time_s, lane.name)
            self._next_in(lane)
        self._uncharge(flow)

    def _uncharge(self, flow: Flow) -> None:
        """Take what has not left off the traffic; a message of which nothing has left was never sent."""
        unsent, row = flow.remaining / flow.size_bytes, flow.lane.row
        row[0] -= 1 if unsent == 1 else 0
        row[1] -= round(unsent * payload_bytes(flow.transfer.message))
        row[2] -= round(unsent * flow.encoded_bytes)

    def _next_in(self, lane: Lane) -> None:
        """One has left a lane: the next starts."""
        if lane.waiting:
            self._links.start(lane.waiting.pop(0))
        else:
            lane.busy = False

    def _left(self, flow: Flow, hold_s: float) -> None:
        """The last byte of a flow has left its sender."""
        lane = flow.lane
        self.observer.span(lane.sender, "send", flow.start_s, self._time_s, lane.name)
        if lane.busy:
            self._next_in(lane)
        transfer = flow.transfer
        self.left(transfer)
        if not transfer.unsent:
            self._forget(transfer)
        arrives = self._time_s + (hold_s + lane.latency() + flow.encoded_bytes / lane.copying_rate)
        if lane.kind.lossy:
            if lane.loss > 0 and self._draws_of("loss", lane.sender).next() < lane.loss:
                return
        elif self._may_overtake:
            arrives = lane.last_arrival_s = max(arrives, lane.last_arrival_s)
        self._arrive_at(arrives, flow)

    def _arrive(self, flow: Flow) -> None:
        if flow.transfer.cancelled:
            return
        lane = flow.lane
        heal_s = self._partitioned_until(lane.sender, lane.receiver) if self._partitions else None
        if heal_s is not None:
            if not lane.kind.lossy:
                self._arrive_at(heal_s, flow)
            return
        state: NodeState = lane.state
        if not state.alive:
            if not self._is_silent(lane.receiver):
                self.call_later(self.plan.faults.detect_s, self.undeliverable, flow.transfer, lane.receiver)
            return
        self.hand(state, flow.transfer.message)
        self.acknowledged(flow.transfer)

    def _partitioned_until(self, a: int, b: int) -> float | None:
        for partition in self._partitions:
            end_s = partition.at_s + partition.for_s
            if partition.at_s <= self._time_s < end_s and (a in partition.nodes) != (b in partition.nodes):
                return end_s
        return None

    # --- faults ------------------------------------------------------------------------------------------

    def _crash(self, crash: Crash) -> None:
        if not self.states[crash.node].alive:
            return  # it is down, and returns when its earlier crash says
        self._kill(crash.node, will_return=crash.down_s is not None)
        if crash.down_s is not None:
            self.call_later(crash.down_s, self._return, crash.node)

    def _kill(self, node: int, will_return: bool) -> None:
        state = self.states[node]
        if not state.alive:
            return
        self.observer.event(self._time_s, "crash", node, "")
        self.end_life(node)
        state.processor.clear(self._time_s)
        for transfer in list(self._leaving[node])[::-1]:
            for flow in transfer.flows[::-1]:  # the queued ones first, so that none of them starts
                self._links_off(flow)
            transfer.cancelled = True
            self._forget(transfer)
        if not will_return:
            self.awaited.discard(node)
        if not self._is_silent(node):
            self.call_later(self.plan.faults.detect_s, self._detect, node, state.life)

    def _is_silent(self, node: int) -> bool:
        """Whether a dead node went without anybody being told."""
        crashes = [c for c in self.plan.faults.crashes if c.node == node and c.at_s <= self._time_s]
        return bool(crashes) and max(crashes, key=lambda c: c.at_s).silent

    def _detect(self, node: int, life: int) -> None:
        state = self.states[node]
        if not state.alive and state.life == life:
            self.observer.event(self._time_s, "gone", node, "")
            self.peer_gone(node)

    def _drain(self, node: int) -> None:
        """Look at a battery now, and again when it could at the earliest be flat."""
        spec, state = self.plan.nodes[node], self.states[node]
        battery_j, profile = spec.battery_j, spec.profile
        assert battery_j is not None and profile.busy_w is not None
        num_bytes = self.traffic.node_bytes(node)
        busy_s = state.processor.busy_until(self._time_s)
        used_j = modelled_joules(profile, self._time_s, busy_s, num_bytes)
        assert used_j is not None
        if used_j >= battery_j * (1 - 1e-9):
            self._flat.add(node)
            self.observer.event(self._time_s, "battery flat", node, f"{battery_j:g} J used")
            self._kill(node, will_return=False)
            return
        access = self.plan.network.access[node]
        rate = access.up_bytes_per_s + access.down_bytes_per_s
        most_w = profile.busy_w + (profile.radio_j_per_byte or 0.0) * rate
        wait_s = max(battery_j - used_j, 1e-4 * battery_j) / most_w
        self.call_aside(wait_s, self._drain, node)

    def _return(self, node: int) -> None:
        if node in self._flat:
            return
        state = self.states[node]
        state.alive = True
        state.life += 1
        state.known_dead = {i for i, other in self.states.items() if not other.alive}
        self.observer.event(self._time_s, "back", node, "")
        self.peer_gone(node)  # who had not noticed hears of the death and of the return at once
        self.peer_back(node, state.life)
        self.begin_life(node)

    def node_failed(self, node: int) -> None:
        self._kill(node, will_return=False)


@contextmanager
def _rare_collections(num_nodes: int) -> Iterator[None]:
    """Collect garbage rarely: events make many small objects and hardly any cycle (6 to 15 % of a run).

    What a large fleet has under way at once is to be gone before it is looked at.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(100_000, 100 * num_nodes), 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Let a worker that has been given work begin at once, and not when this thread waits: most of its time
    it holds no lock of the interpreter. Each operator that this thread calls lets go of the lock for a moment
    too short to take it, and a waiting worker's patience begins anew: with 0.2 ms it often waited for 2."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
