"""The gRPC runtime of a process that can be killed and started again."""

from __future__ import annotations

import json
import logging
import time
from functools import partial
from typing import Any

from edgefl.messages.base import Message
from edgefl.nodes.handles import Task
from edgefl.nodes.operations import Receive, Save
from edgefl.runtimes.grpc.keeper import Keeper
from edgefl.runtimes.grpc.lead import LastModel
from edgefl.runtimes.grpc.reports import add_traffic
from edgefl.runtimes.grpc.runtime import GrpcRuntime
from edgefl.runtimes.grpc.state import StateFolder
from edgefl.runtimes.outcome import INTERRUPTED
from edgefl.runtimes.tasks import WAIT

log = logging.getLogger("edgefl.grpc")


class ReturningRuntime(GrpcRuntime):
    """Runs the one node of a process with a state folder.

    What its program saves is on the disk before the messages that it used are given up by their senders, so
    a next life goes on as if it had been slow. A program that never saves begins anew and is sent all again,
    up to `limits.kept_bytes`.
    """

    def __init__(self, *args: Any, state: StateFolder, **options: Any) -> None:
        super().__init__(*args, life=state.life, keeps=True, **options)
        self._folder = state
        self._keeper = Keeper(state, self._transport, self, self._limits.kept_bytes)

    def before(self) -> None:
        """Know what an earlier life of this process knew when its program saved last."""
        self._folder.begin()
        if self._life == 0:
            return
        content = self._folder.load(self.codec.layouts)
        self._elapsed_s = max(0.0, time.time() - self._folder.began_s)
        if content is None:
            return
        self._elapsed_s = max(self._elapsed_s, content["time_s"])  # a clock may have been set back
        report = json.loads(content["report"])
        busy = {int(i): s for i, s in report["busy_s"].items()}
        self._merging.resume(report["rows"], busy)
        add_traffic(self.traffic, report["traffic"])
        (state,) = self.states.values()
        state.saved = content["saved"]
        state.processor.busy_s = busy[state.id]
        if content["last"] is not None:
            self._last[state.id] = LastModel(state.id, *content["last"])
        self._tell_observer("crash", state.id, content["time_s"])

    def connected(self) -> None:
        """Take up the place of the earlier life."""
        if self._life == 0:
            self._folder.start(self.clock())
            return
        (node,) = self.states
        log.info("node %d is back, life %d, %.1f s into the run", node, self._life, self.clock())
        self._tell_observer("back", node, self.clock(), f"life {self._life}")
        if not self._folder.complete:
            self._broadcast("anew", {"node": node, "life": self._life})
        if node in self._last:
            last = self._last[node]
            self._pool.submit(self._publish, node, last.time_s, last.step, last.parameters, None)

    def sent(self) -> int:
        return self._keeper.sent()

    def settled(self, number: int) -> None:
        """What fails because this process ends has not arrived."""
        if not self._over.is_set():
            self._keeper.settled(number)

    def arrived(self, receiver: int, message: Message) -> None:
        super().arrived(receiver, message)
        self._keeper.arrived()

    def after(self, over: bool) -> None:
        self._keeper.close(over=over)
        if self.stop_reason == INTERRUPTED and not self._leaving:
            self._folder.pause(self.clock())

    def _begin_save(self, task: Task[Any], op: Save) -> Any:
        super()._begin_save(task, op)
        state: Any = task.state
        if not op.stored:
            self._keeper.saved(self._content(state), state.inbox.waiting())
            return None
        then = partial(self.wake, task, task.token, None)
        self._keeper.saved(self._content(state), state.inbox.waiting(), then)
        return WAIT

    def _begin_receive(self, task: Task[Any], op: Receive) -> Any:
        """A program without state that waits again is where it would be if it had just been started."""
        state: Any = task.state
        if task.parent is None and not task.children and self._is_stateless(state):
            content = self._content(state) if self._keeper.wants_records else None
            self._keeper.saved(content, state.inbox.waiting())
        return super()._begin_receive(task, op)

    def _content(self, state: Any) -> dict[str, Any]:
        """What a next life needs; its tables are copies, since they grow while they are written."""
        last = self._last.get(state.id)
        report = self._report()
        rows = report["rows"].items()
        report["rows"] = {name: list(table) if isinstance(table, list) else table for name, table in rows}
        return {
            "saved": state.saved,
            "time_s": self.clock(),
            "last": None if last is None else (last.time_s, last.step, last.parameters),
            "report": report,
        }
