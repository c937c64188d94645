"""Running nodes of a plan in this process: all, each behind a port of its own, or those of one place."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from edgefl.learning.executors import Executor
from edgefl.nodes.plan import RunPlan
from edgefl.runtimes.grpc.lead import MergingObserver, RemoteFailure
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.loop import run
from edgefl.runtimes.grpc.place import Place
from edgefl.runtimes.grpc.returning import ReturningRuntime
from edgefl.runtimes.grpc.runtime import GrpcRuntime
from edgefl.runtimes.grpc.state import StateFolder
from edgefl.runtimes.outcome import Outcome

_FIRST_PORT, _PORTS = 10_000, 22_000


def run_here(
    plan: RunPlan,
    observers: Sequence[MergingObserver],
    executor: Executor | None,
    *,
    run_id: str,
    digest: str,
    emulate: bool = False,
    limits: Limits | None = None,
) -> Outcome:
    """Run a whole plan in this process, each node behind its own gRPC port on loopback.

    observers: one per node; the first takes in what the others recorded. Raises what ended the run.
    """
    addresses = free_addresses(len(plan.nodes))
    nodes_of = tuple((i,) for i in range(len(plan.nodes)))
    places = [Place(run_id, i, addresses, nodes_of) for i in range(len(plan.nodes))]

    async def run_all() -> Outcome:
        with ThreadPoolExecutor(1, thread_name_prefix="edgefl-work") as pool:
            runtimes = [
                GrpcRuntime(
                    plan, observer, executor, place, digest=digest, emulate=emulate, limits=limits, pool=pool
                )
                for place, observer in zip(places, observers, strict=True)
            ]
            with _interruptible([r.interrupt for r in runtimes]):
                ended = await asyncio.gather(*(r.run() for r in runtimes), return_exceptions=True)
        return _lead(ended)

    return _run(run_all)


def run_place(
    plan: RunPlan,
    observer: MergingObserver,
    executor: Executor | None,
    place: Place,
    *,
    digest: str,
    emulate: bool = False,
    limits: Limits | None = None,
    state: StateFolder | None = None,
    listen: str | None = None,
    probes: bool = False,
    check_others: Callable[[], None] | None = None,
) -> Outcome:
    """Run the nodes of one place; at the lead the outcome is the whole run's.

    state: where the place's one node keeps what it needs to go on after a crash. listen: where this process
    serves, when not at its address. probes: a process that joins measures its way to the lead. check_others:
    called now and then until all have connected; raises where one of them never will.
    """

    async def run_one() -> Outcome:
        start: Callable[..., GrpcRuntime] = GrpcRuntime
        if state is not None:
            start = partial(ReturningRuntime, state=state)
        runtime = start(
            plan, observer, executor, place, digest=digest, emulate=emulate, limits=limits, listen=listen,
            probes=probes, check_others=check_others,
        )  # fmt: skip
        with _interruptible([runtime.leave]):
            return await runtime.run()

    return _run(run_one)


def free_addresses(count: int) -> tuple[str, ...]:
    """So many addresses on loopback, at free ports."""
    return tuple(f"127.0.0.1:{port}" for port in free_ports(count))


def free_ports(count: int) -> list[int]:
    """So many ports that were free on loopback a moment ago.

    They lie below those that systems give to outgoing connections and to whoever asks for any: such a
    one is soon somebody else's, above all while a process that had it is started again.
    Raises OSError where hardly any is free.
    """
    sockets: list[socket.socket] = []
    try:
        for _ in range(100 * count):
            if len(sockets) == count:
                return [s.getsockname()[1] for s in sockets]
            with suppress(OSError):
                sockets.append(socket.create_server(("127.0.0.1", _FIRST_PORT + secrets.randbelow(_PORTS))))
        raise OSError(f"no {count} free ports from {_FIRST_PORT} to {_FIRST_PORT + _PORTS - 1}")
    finally:
        for s in sockets:
            s.close()


def _lead(ended: Sequence[Outcome | BaseException]) -> Outcome:
    """The lead's outcome, or the error that came first: a program's own before its echo elsewhere."""
    errors = [e for e in ended if isinstance(e, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, RemoteFailure)):
        raise error
    lead = ended[0]
    assert isinstance(lead, Outcome)
    return lead


def _run(program: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
    """Run to the end in a loop of its own; where one runs already (a notebook's), in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(program())
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[Outcome]]] = []

    async def known() -> Outcome:
        task = asyncio.ensure_future(program())
        running.append((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(1, thread_name_prefix="edgefl-loop") as pool:
        ended = pool.submit(lambda: run(known()))
        try:
            return ended.result()
        except KeyboardInterrupt:
            for loop, task in running:
                with suppress(RuntimeError):  # it has just ended
                    loop.call_soon_threadsafe(task.cancel)
            raise


@contextmanager
def _interruptible(ends: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run, or a process's part in it, in good order."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        for end in ends:
            end()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            loop.add_signal_handler(number, interrupt)
    except (NotImplementedError, RuntimeError, ValueError):
        yield  # not the main thread, or a platform without: the caller's own handling stays
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
