"""The gRPC runtime: one process of a run, from connecting to the others to the run's records."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from edgefl.learning.executors import Executor
from edgefl.messages.base import Message
from edgefl.nodes.plan import RunPlan
from edgefl.runtimes.grpc.lead import LEAD, LastModel, LeadLost, MergingObserver, RemoteFailure
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.measuring import measure_in_time
from edgefl.runtimes.grpc.place import Place
from edgefl.runtimes.grpc.reports import Elsewhere, add_traffic, outcome_of, report_of
from edgefl.runtimes.grpc.state import StateLost
from edgefl.runtimes.grpc.transport import Transport
from edgefl.runtimes.grpc.wall import WallInterpreter
from edgefl.runtimes.outcome import INTERRUPTED, Outcome

log = logging.getLogger("edgefl.grpc")
_SILENCE_S = 10.0  # a wait of this length is said aloud
_CHECK_S = 0.2  # between two looks at whether the others can still come


class GrpcRuntime(WallInterpreter):
    """Runs the nodes that one process hosts.

    emulate: computing is slowed to each node's device profile, and, but in a lab, sending is paced at its
    planned uplink and held back for the planned latency of the pair.
    pool: the worker thread that trains; shared by runtimes of one Python process. listen: where the process
    serves, when not at its address. probes: a process that joins for the first time measures its way to the
    lead, once and briefly. check_others: called now and then until all have connected; raises where one of
    them never will. life: of its nodes; keeps: whether the others keep what they have sent
    here until it is covered.
    """

    def __init__(
        self,
        plan: RunPlan,
        observer: MergingObserver,
        executor: Executor | None,
        place: Place,
        *,
        digest: str,
        emulate: bool = False,
        limits: Limits | None = None,
        pool: ThreadPoolExecutor | None = None,
        listen: str | None = None,
        probes: bool = False,
        check_others: Callable[[], None] | None = None,
        life: int = 0,
        keeps: bool = False,
    ) -> None:
        super().__init__(plan, observer, executor, place.hosted, emulate=emulate, pool=pool, life=life)
        self.place = place
        self._limits = limits or Limits()
        self._merging = observer
        self._lead_begins = asyncio.Event()
        self._reports: dict[int, Any] = {}
        self._elsewhere: list[Elsewhere] = []
        self._models: dict[int, LastModel] = {}
        self._gone: set[int] = set()
        self._life, self._returns = life, keeps
        self._probes = probes and place.index != LEAD and life == 0 and not place.on_loopback
        self._check_others = check_others or _nothing
        self._elapsed_s = 0.0
        self._leaving = False
        here = place.hosted[0]
        paced = emulate and not place.lab
        ways_s = [plan.network.latency_s(here, nodes[0]) for nodes in place.nodes_of]
        self._transport = Transport(
            index=place.index,
            addresses=place.addresses,
            nodes_of=place.nodes_of,
            codec=self.codec,
            run_id=place.run_id,
            digest=digest,
            on_message=self.arrived,
            on_gone=self._heard_gone,
            on_back=self._heard_back,
            on_control=self._control,
            limits=self._limits,
            uplink_bytes_per_s=plan.network.access[here].up_bytes_per_s if paced else None,
            latencies_s=ways_s if paced else (),
            life=life,
            keeps=keeps,
            listen=listen,
        )
        self._lives = dict.fromkeys(range(len(plan.nodes)), 0)

    # --- the run ---------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Connect, run the hosted programs to the end of the run, and gather what the others recorded.

        Returns at the lead the outcome of the whole run, elsewhere this process's part of it. Raises what
        ended the run: ProgramFailed here, RemoteFailure for a program elsewhere.
        """
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        background: list[asyncio.Task[None]] = []
        over = False
        try:
            self.before()
            if self._probes:
                found = await measure_in_time(self.place.addresses[LEAD], self._limits, self._over)
                if found is not None:
                    self._merging.measured(self.place.hosted, found)
            if not await self._all_are_here():
                self._tell_the_others()
                return self._outcome(0.0)
            self.connected()
            for i in self.states:
                self.begin_life(i)
            background = [asyncio.create_task(self._tick()), asyncio.create_task(self._speak_up())]
            if self.plan.time_s is not None:
                self.call_later(max(0.0, self.plan.time_s - self.clock()), self.stop, "time limit")
            await self._over.wait()
            end_s = self.clock()
            over = self.stop_reason != INTERRUPTED and not isinstance(self.failure, LeadLost | StateLost)
            self.end_all()
            await self._loop.run_in_executor(self._pool, _nothing)  # what was published has been looked at
            self._tell_the_others()
            if self.failure is not None:
                raise self.failure
            await self._gather_reports()
            return self._outcome(end_s)
        finally:
            self._over.set()
            self.end_all()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._transport.close(farewell=over or not self._returns)
            self.after(over)
            if self._own_pool:
                self._pool.shutdown(wait=False, cancel_futures=True)

    async def _all_are_here(self) -> bool:
        """Connect to the others; False where the run is ended from outside before it has begun."""
        start = asyncio.create_task(self._join())
        over = asyncio.create_task(self._over.wait())
        try:
            while not start.done() and not over.done():
                self._check_others()
                await asyncio.wait({start, over}, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()
            return not self._over.is_set()
        finally:
            for task in (start, over):
                task.cancel()
            await asyncio.gather(start, over, return_exceptions=True)

    async def _join(self) -> None:
        """Connect to the others, and start the clock with the lead's, so that all records fit together.

        The lead begins when it has connected to all, and says so; who is in a later life knows the time.
        """
        await self._transport.start()
        if self.place.index != LEAD and self._life == 0:
            await self._lead_begins.wait()
            return
        self._start_s = self._loop.time() - self._elapsed_s
        if self.place.index == LEAD:
            for process in self._others():
                self._say_the_time(process)

    def _say_the_time(self, process: int) -> None:
        self._transport.control(process, "begin", json.dumps({"time_s": self.clock()}).encode())

    def _lead_began(self, process: int, time_s: float) -> None:
        if process == LEAD and math.isfinite(time_s) and not self._lead_begins.is_set():
            if self._life == 0:
                self._start_s = self._loop.time() - time_s
            self._lead_begins.set()

    def before(self) -> None:
        """The run is about to begin."""

    def connected(self) -> None:
        """The run begins, or goes on."""

    def arrived(self, receiver: int, message: Message) -> None:
        """A message has come."""
        if isinstance(message, LastModel):
            if message.node == message.sender:
                self._models[message.node] = message
        else:
            self._guarded(self.deliver, (receiver, message))

    def after(self, over: bool) -> None:
        """All connections have ended; over: the run has."""

    def interrupt(self) -> None:
        """Ask for the end of the run from outside (a signal)."""
        self.call_soon(self.stop, INTERRUPTED)

    def leave(self) -> None:
        """Ask for the end of this process's part; the lead takes the whole run with it."""
        self._leaving = self.place.index != LEAD
        self.interrupt()

    async def _tick(self) -> None:
        every = self.observer.every_s
        count = 1 if every is None else int(self.clock() / every) + 1
        while every is not None:
            await asyncio.sleep(max(0.0, count * every - self.clock()))
            if await self._loop.run_in_executor(self._pool, self.observer.tick, count * every):
                self.call_soon(self.stop, "target reached")
            count += 1

    async def _speak_up(self) -> None:
        """Say what is waited for when nothing has moved for a while."""
        while True:
            await asyncio.sleep(_SILENCE_S / 2)
            if self._loop.time() - self._moved_s >= _SILENCE_S:
                for name, what in self.waits().items():
                    log.warning("%s waits for %s", name, what)
                self._moved_s = self._loop.time()

    # --- the end of a run ---------------------------------------------------------------------------------

    def node_ended(self, node: int) -> None:
        self._broadcast("ended", {"node": node})

    def stop(self, reason: str) -> None:
        super().stop(reason)
        self._over.set()

    def _others(self) -> list[int]:
        """The other processes, but for those whose nodes are gone."""
        return [
            p
            for p, nodes in enumerate(self.place.nodes_of)
            if p != self.place.index and not self._gone.issuperset(nodes)
        ]

    def _broadcast(self, kind: str, body: dict[str, Any]) -> None:
        for process in self._others():
            self._transport.control(process, kind, json.dumps(body).encode())

    def _tell_the_others(self) -> None:
        """Why the run ends here, unless it ended by itself, which the others notice too."""
        if self._leaving:
            if not self._returns:
                self._broadcast("leaving", {"nodes": self.place.hosted})
        elif self.failure is not None:
            if not isinstance(self.failure, RemoteFailure | LeadLost | StateLost):
                trace = "".join(traceback.format_exception(self.failure))
                self._broadcast("failed", {"text": str(self.failure), "trace": trace})
        elif self.stop_reason is not None:
            self._broadcast("stop", {"reason": self.stop_reason})

    async def _gather_reports(self) -> None:
        """Send this process's records to the lead, or be the lead and wait for the others'."""
        if self.place.index != LEAD:
            # The models first: the lead ends when it has the reports, which would overtake them.
            sent = [self._sent(model) for model in self._last.values()]
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*sent), self._limits.grace_s)
            self._transport.control(LEAD, "report", json.dumps(self._report()).encode())
            return
        deadline_s = self._loop.time() + self._limits.grace_s
        while missing := [p for p in self._others() if p not in self._reports]:
            if self._loop.time() > deadline_s:
                log.warning("no report from process %s within %g s", missing, self._limits.grace_s)
                break
            await asyncio.sleep(0.01)
        for process in sorted(self._reports):
            self._take_report(process, self._reports[process])

    def _take_report(self, process: int, report: Any) -> None:
        """Add another process's records to these; of what is no report, nothing after its first fault."""
        try:
            self._elsewhere.append(Elsewhere.of(report))
            add_traffic(self.traffic, report["traffic"])
            self._merging.merge(report["rows"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("process %d sent a report that makes no sense: %r", process, error)

    def _report(self) -> dict[str, Any]:
        return report_of(self, self._merging, self._transport.stats.frame_bytes_sent)

    def _sent(self, model: LastModel) -> asyncio.Future[None]:
        """Send a last model to the lead; done when it has it, or cannot have it any more."""
        done = self._loop.create_future()

        def delivered(error: Exception | None) -> None:
            if not done.done():
                done.set_result(None)

        stamped = model.stamped(model.node, self._life)
        self._transport.send(model.node, 0, stamped, on_left=lambda: None, on_delivered=delivered)
        return done

    def _outcome(self, end_s: float) -> Outcome:
        return outcome_of(
            self, self._transport.stats.frame_bytes_sent, self._elsewhere, self._models.values(), end_s
        )

    # --- what the other processes say -----------------------------------------------------------------------

    def _heard_gone(self, node: int) -> None:
        if node in self._gone:
            return
        self._gone.add(node)
        self._tell_observer("gone", node, self.clock())
        self._guarded(self._without, (node,))

    def _without(self, node: int) -> None:
        self.awaited.discard(node)
        self.peer_gone(node)
        if self._returns and self.place.index != LEAD and self.place.process_of(node) == LEAD:
            self.failure = self.failure or LeadLost(
                f"{self.plan.name(node)} leads and has been away for {self._limits.grace_s:g} s; "
                "the same command goes on from here when it is back"
            )

    def _heard_back(self, node: int, life: int) -> None:
        """A process returned after it was gone, or in a new life, of which only observers hear: its node
        has what was sent to it, and goes on as if it had been slow."""
        lost_s = self._transport.lost_at(node)
        if life > self._lives[node] and lost_s is not None:
            self._tell_observer("crash", node, lost_s - self._start_s)
        self._tell_observer("back", node, self.clock(), f"life {life}")
        self._lives[node] = life
        self._gone.discard(node)
        if self.plan.nodes[node].role in self.plan.method.ends_with:
            self.awaited.add(node)
        if self.place.index == LEAD:
            self._say_the_time(self.place.process_of(node))
        for ended in self.results:
            body = json.dumps({"node": ended}).encode()
            self._transport.control(self.place.process_of(node), "ended", body)
        self._guarded(self.peer_back, (node, life))

    def _heard_anew(self, node: int, life: int) -> None:
        """A node could not go on from where it was: to programs, its death and its return."""
        self.peer_gone(node)
        self.peer_back(node, life)

    def _tell_observer(self, kind: str, node: int, time_s: float, detail: str = "") -> None:
        """One process notes what becomes of the others, the one that leads."""
        if self.place.index == LEAD:
            self.observer.event(time_s, kind, node, detail)

    def _control(self, process: int, kind: str, body: bytes) -> None:
        """A note from another process: what of it is not understood is dropped with a line."""
        try:
            note = json.loads(body)
            if kind == "ended":
                self._guarded(self.awaited.discard, (self._hosted_by(process, note["node"]),))
            elif kind == "begin":
                self._lead_began(process, float(note["time_s"]))
            elif kind == "stop":
                self._guarded(self.stop, (str(note["reason"]),))
            elif kind == "leaving":
                for node in [self._hosted_by(process, node) for node in note["nodes"]]:
                    self._heard_gone(node)
            elif kind == "anew":
                node, life = self._hosted_by(process, note["node"]), int(note["life"])
                self._guarded(self._heard_anew, (node, life))
            elif kind == "failed":
                self._guarded(self._fail, (str(note["text"]), str(note["trace"])))
            elif kind == "report":
                self._reports[process] = note
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("process %d sent a note that makes no sense: %s: %s", process, kind, error)

    def _hosted_by(self, process: int, node: object) -> int:
        """The id of a node of that process: nobody speaks for another's nodes."""
        if node not in self.place.nodes_of[process]:
            raise ValueError(f"node {str(node)[:40]} is not of process {process}")
        return int(str(node))

    def _fail(self, text: str, trace: str) -> None:
        self.failure = self.failure or RemoteFailure(text, trace)


def _nothing() -> None:
    pass
