"""Running a plan over real gRPC on this machine, and one place of a run anywhere."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from edgefl.errors import ConfigError
from edgefl.experiment.build import Built, build
from edgefl.experiment.config import load_experiment
from edgefl.experiment.observer import RunObserver
from edgefl.runtimes.grpc import local as grpc
from edgefl.runtimes.grpc.place import FleetFile, read_fleet
from edgefl.runtimes.outcome import Outcome

ENDING_S = 20.0
"""Seconds that a node's process has to end after the run."""


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


def run_processes(folder: Path, built: Built, observer: RunObserver) -> Outcome:
    """Node 0 in this process and each other one in its own, started from the folder's files.

    Leaves fleet.toml and what each process wrote on its standard error, node-ID.log, in the folder.
    """
    n = len(built.plan.nodes)
    fleet = FleetFile(
        folder.name, Path("experiment.toml"), grpc.free_addresses(n), tuple((i,) for i in range(n))
    )
    file = folder / "fleet.toml"
    file.write_text(fleet.to_toml(), encoding="utf-8")
    with ExitStack() as stack:
        for i in range(1, n):
            log = stack.enter_context((folder / f"node-{i}.log").open("wb"))
            command = [sys.executable, "-m", "edgefl.experiment.local", str(file), str(i)]
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            stack.callback(_end, process)
        return _run_place(fleet, 0, built, observer)


def run_node(fleet_file: Path, node: int) -> None:
    """Run the place of a fleet file that hosts `node`, to the end of the run.

    Raises ConfigError for a wrong file or node, and whatever ends the run.
    """
    fleet = read_fleet(fleet_file)
    built = build(load_experiment(fleet.experiment))
    if len(built.plan.nodes) != fleet.place(node).num_nodes:
        found = f"{fleet.place(node).num_nodes} nodes"
        raise ConfigError("fleet.process.nodes", found, f"the experiment has {len(built.plan.nodes)}")
    _run_place(fleet, node, built, RunObserver(built, hosted=fleet.place(node).hosted))


def _run_place(fleet: FleetFile, node: int, built: Built, observer: RunObserver) -> Outcome:
    return grpc.run_place(
        built.plan,
        observer,
        built.executor,
        fleet.place(node),
        digest=_digest(built),
        emulate=built.experiment.execution.emulate,
    )


def _digest(built: Built) -> str:
    """What processes compare to know that they run the same experiment."""
    return hashlib.sha256(built.experiment.to_toml().encode()).hexdigest()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a node's process to end by itself, and end it when it does not."""
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    run_node(Path(sys.argv[1]), int(sys.argv[2]))
