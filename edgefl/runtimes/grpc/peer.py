"""Another process of the run, through all of its connections and lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgefl.errors import ProtocolError, Unreachable
from edgefl.messages.wire import PROTOCOL_VERSION
from edgefl.runtimes.grpc.assembly import Assembly
from edgefl.runtimes.grpc.connection import Connection
from edgefl.runtimes.grpc.frames import Cancel, Data, Frame, Goodbye, Hello, Receipt, Start
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.outbox import Outbox

log = logging.getLogger("edgefl.grpc")
REVISION = 1
"""Of the protocol's form, as this version speaks it; exchange.proto says what each adds."""


@dataclass(frozen=True)
class Identity:
    """What all processes of a run must agree on, and who this one is."""

    index: int
    nodes: tuple[int, ...]
    life: int
    run_id: str
    digest: str
    instance: bytes

    def hello(self, begun: tuple[int, ...]) -> Hello:
        lives = (self.life,) * len(self.nodes)
        return Hello(
            PROTOCOL_VERSION,
            self.run_id,
            self.digest,
            self.index,
            self.nodes,
            lives,
            self.instance,
            begun,
            REVISION,
        )

    def check(self, hello: Hello) -> None:
        """Raises ProtocolError when the other process is not of this run."""
        for what, theirs, ours in (
            ("protocol version", hello.protocol_version, PROTOCOL_VERSION),
            ("run", hello.run_id, self.run_id),
            ("experiment", hello.experiment_digest, self.digest),
        ):
            if theirs != ours:
                # Not the whole digest: whoever has it may say that it belongs to the run.
                here, there = (str(value)[: 12 if what == "experiment" else 80] for value in (ours, theirs))
                raise ProtocolError(f"{what} {there!r} there, {here!r} here", "FAILED_PRECONDITION")


class Peer:
    """Another process: what goes to it, what comes from it, and whether it is there.

    on_gone(node): it stayed away for `grace_s`. on_back(node, life): it returned after that, or started anew.
    """

    def __init__(
        self,
        index: int,
        address: str,
        nodes: Sequence[int],
        *,
        outbox: Outbox,
        assembly: Assembly,
        limits: Limits,
        on_gone: Callable[[int], None],
        on_back: Callable[[int, int], None],
    ) -> None:
        self.index, self.address, self.nodes = index, address, tuple(nodes)
        self.outbox, self.assembly, self._grace_s = outbox, assembly, limits.grace_s
        self._on_gone, self._on_back = on_gone, on_back
        self.connection: Connection | None = None
        self.arriving = asyncio.Lock()
        self.gone = False
        self.ended = False
        """It said Goodbye."""
        self.left = False
        """This process closes: that a connection ends is no news."""
        self.life = -1
        """-1: it was never here."""
        self.arrivals = 0
        self.problem = ""
        """Why the last attempt to connect failed."""
        self.lost_at: float | None = None
        """When its connection ended, on the loop's clock; None while it is here."""
        self.instance = b""
        self.revision = 0
        """What it understands, as it said last."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def title(self) -> str:
        """How people know it."""
        return f"process {self.index} ({self.address}, nodes {', '.join(map(str, self.nodes))})"

    def check(self, hello: Hello) -> None:
        """Raises ProtocolError when a Hello is not this process's, or one of an earlier life."""
        lives = set(hello.lives)
        if hello.process != self.index or hello.nodes != self.nodes or len(lives) != 1:
            raise ProtocolError(
                f"process {hello.process} with nodes {list(hello.nodes)[:20]}, expected {self.title}",
                "FAILED_PRECONDITION",
            )
        (life,) = lives
        if life < self.life or (life == self.life and hello.instance != self.instance):
            raise ProtocolError(
                f"process {self.index} is here already with life {self.life}; another needs a higher one",
                "FAILED_PRECONDITION",
            )

    async def make_way(self) -> None:
        """End the present connection, for a new one."""
        if self.connection is not None:
            self.connection.replace()
            await self.connection.ended.wait()
            self.connection = None

    def expect(self) -> None:
        """It should be there: unless it connects within `grace_s` it is gone."""
        self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._expire)

    def arrive(self, hello: Hello, connection: Connection) -> None:
        """A connection is up, and the process behind it has been checked."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        (life,) = set(hello.lives)
        started_anew = hello.instance != self.instance
        returned = self.life >= 0 and (started_anew or self.gone)
        if started_anew:
            self.assembly.forget()
        else:
            self.assembly.keep_only(hello.open)
        self.life, self.instance = life, hello.instance
        self.gone = self.ended = False
        self.arrivals += 1
        self.connection = connection
        self.revision = hello.revision
        self.outbox.begin(loop.time(), together=self.revision >= 1)
        if returned:
            for node in self.nodes:
                loop.call_soon(self._on_back, node, life)
        else:
            self.lost_at = None
        log.info("connected to %s, life %d", self.title, life)

    def depart(self, connection: Connection) -> None:
        """A connection has ended."""
        if self.connection is connection:
            self.connection = None
        if not self.ended and not self.left and self.connection is None:
            loop = asyncio.get_running_loop()
            log.info("lost %s; it is gone if it stays away for %.3g s", self.title, self._grace_s)
            self.lost_at = loop.time()
            self._timer = loop.call_later(self._grace_s, self._expire)

    def stop(self, error: Exception) -> None:
        """This process closes: nothing more is expected."""
        if self._timer is not None:
            self._timer.cancel()
        self.outbox.fail(error)
        self.assembly.keep_only(())

    def take(self, frame: Frame) -> None:
        """Act on a frame from it. Raises ProtocolError for one that has no place here."""
        match frame:
            case Data():
                self.assembly.data(frame)
            case Receipt():
                self.outbox.receipt(frame, asyncio.get_running_loop().time())
            case Start():
                self.assembly.start(frame)
            case Cancel(sequence):
                self.assembly.cancel(sequence)
            case Goodbye():
                self.ended = True
                log.info("%s said goodbye", self.title)
                self.stop(Unreachable(f"{self.title} has ended"))
            case Hello():
                raise ProtocolError("a second Hello in one stream", "FAILED_PRECONDITION")

    def _expire(self) -> None:
        self.gone = True
        log.warning("%s stayed away for %.3g s and is gone", self.title, self._grace_s)
        loop = asyncio.get_running_loop()
        for node in self.nodes:
            loop.call_soon(self._on_gone, node)
        self.stop(Unreachable(f"{self.title} is gone"))
