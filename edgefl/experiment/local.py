"""Running a plan over real gRPC on this machine, and one place of a run anywhere."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from edgefl.devices.energy import open_meter
from edgefl.errors import ConfigError, RunError
from edgefl.experiment import orphans, runner
from edgefl.experiment.build import Built, build
from edgefl.experiment.config import load_experiment
from edgefl.experiment.energy import sampled
from edgefl.experiment.hosts import Hosts
from edgefl.experiment.observer import RunObserver
from edgefl.experiment.pool import ending
from edgefl.experiment.progress import Progress
from edgefl.experiment.threads import one_thread
from edgefl.runtimes.grpc import local as grpc
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.place import FleetFile, Place, read_fleet
from edgefl.runtimes.grpc.state import StateFolder
from edgefl.runtimes.outcome import INTERRUPTED, Outcome
from edgefl.whole import write_whole

ENDING_S = 20.0
"""Seconds that a node's process has to end after the run."""
GRACE_S = 30.0
"""A process that stays away so long is gone, unless the command says otherwise."""
_START_S = 900.0
"""Devices are switched on one after the other: so long the first waits for the last."""


def run_here(folder: Path, built: Built, observer: RunObserver) -> Outcome:
    """All nodes in this process, each behind a port of its own. observer: of node 0."""
    others = [RunObserver(built, hosted=(i,)) for i in range(1, len(built.plan.nodes))]
    emulate = built.experiment.execution.emulate
    return grpc.run_here(
        built.plan,
        [observer, *others],
        built.executor,
        run_id=folder.name,
        digest=_digest(built),
        emulate=emulate,
    )


def run_processes(folder: Path, built: Built, observer: RunObserver, hosts: Hosts | None = None) -> Outcome:
    """Node 0 in this process, and `edgefl node` for each other one, started from the folder's files.

    hosts: where they live, when not on loopback. Leaves fleet.toml and what each process wrote on its
    standard error, node-ID.log, in the folder.
    """
    n = len(built.plan.nodes)
    addresses = grpc.free_addresses(n) if hosts is None else hosts.addresses
    alone = tuple((i,) for i in range(n))
    fleet = FleetFile(folder.name, Path("experiment.toml"), addresses, alone, lab=hosts is not None)
    file = folder / "fleet.toml"
    write_whole(file, fleet.to_toml())
    processes: dict[int, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for i in range(1, n):
            log = stack.enter_context((folder / f"node-{i}.log").open("wb"))
            command = [sys.executable, "-m", "edgefl.cli", "node", "--fleet", str(file), "--id", str(i)]
            if hosts is not None:
                command = hosts.command(i, command)
            processes[i] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=orphans.environment()
            )
            stack.callback(_end, processes[i])
        if hosts is not None:
            stack.enter_context(hosts.entered())
        outcome = None
        try:
            check = partial(_refuse_dead, processes, folder)
            outcome = _run_place(fleet.place(0), built, observer, Limits(), check_others=check)
        finally:
            if outcome is None or outcome.reason == INTERRUPTED:
                for process in processes.values():
                    _let_go(process)  # also of those that cannot be told: they have not connected yet
        return outcome


def run_node(
    fleet_file: Path,
    node: int,
    *,
    out: Path | None = None,
    state: Path | None = None,
    listen: str | None = None,
    grace_s: float = GRACE_S,
    progress: Progress | None = None,
) -> runner.RunResult | None:
    """Run the process of a fleet file that hosts `node`, to the end of the run.

    The process with node 0 leads: it writes the run's folder (`out`, or runs/RUN_ID) and returns it; the
    others write nothing but logs. state: a folder from which a process with one node goes on after a crash.
    listen: "HOST:PORT" to serve at, when not the fleet file's address. grace_s: a process that stays away so
    long is gone.
    Raises ConfigError for a wrong file, node or folder, KeyboardInterrupt for a run, or this part of it,
    that was ended from outside, and whatever else ends the run.
    """
    fleet = read_fleet(fleet_file)
    place = fleet.place(node)
    built = build(load_experiment(fleet.experiment))
    if len(built.plan.nodes) != place.num_nodes:
        found = f"{place.num_nodes} nodes"
        raise ConfigError("fleet.process.nodes", found, f"the experiment has {len(built.plan.nodes)}")
    kept = None if state is None else _state(state, place, built)
    limits = Limits(connect_timeout_s=_START_S, grace_s=grace_s)

    def execute(observer: RunObserver) -> Outcome:
        if not place.alone_on_its_machine:
            return _run_place(place, built, observer, limits, kept, listen)
        observer.meter = open_meter()
        with sampled(observer.meter):
            return _run_place(place, built, observer, limits, kept, listen)

    if place.index == 0:
        going_on = kept is not None and kept.life > 0
        return runner.lead(built, place, execute, out=out, going_on=going_on, progress=progress)
    if out is not None:
        raise ConfigError("--out", str(out), "the process with node 0 alone writes a folder")
    with one_thread():
        outcome = execute(RunObserver(built, hosted=place.hosted))
    if outcome.reason == INTERRUPTED:
        raise KeyboardInterrupt
    return None


def _state(path: Path, place: Place, built: Built) -> StateFolder:
    if len(place.hosted) > 1:
        raise ConfigError("--state", str(path), f"one node per process; this one hosts {list(place.hosted)}")
    return StateFolder(path, place.run_id, _digest(built))


def _run_place(
    place: Place,
    built: Built,
    observer: RunObserver,
    limits: Limits,
    state: StateFolder | None = None,
    listen: str | None = None,
    check_others: Callable[[], None] | None = None,
) -> Outcome:
    return grpc.run_place(
        built.plan,
        observer,
        built.executor,
        place,
        digest=_digest(built),
        emulate=built.experiment.execution.emulate,
        limits=limits,
        state=state,
        listen=listen,
        probes=built.experiment.network.probe,
        check_others=check_others,
    )


def _digest(built: Built) -> str:
    """What processes compare to know that they run the same experiment."""
    return hashlib.sha256(built.experiment.to_toml().encode()).hexdigest()


def _refuse_dead(processes: Mapping[int, subprocess.Popen[bytes]], folder: Path) -> None:
    """Raises RunError for a node's process that has ended before the run has begun: it will never connect."""
    for node, process in processes.items():
        code = process.poll()
        if code is not None:
            raise RunError(
                f"the process of node {node} {ending(code)} before the run began: "
                f"{folder / f'node-{node}.log'} has what it said"
            )


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Close its standard input: to it, this process has ended, and it ends too."""
    assert process.stdin is not None
    process.stdin.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a node's process to end by itself; end it when it does not, or when nobody wants to wait."""
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()  # nothing, to one that has ended
        process.wait()
        _let_go(process)
