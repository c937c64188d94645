"""Fleets of real processes: started, killed, and started again by a test."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from edgefl.runtimes.grpc.local import free_addresses
from edgefl.runtimes.grpc.place import FleetFile

START_S = 240.0
"""A busy machine may take minutes to import PyTorch in five processes."""


class Fleet:
    """The nodes of an experiment, a process each."""

    def __init__(
        self,
        folder: Path,
        experiment: str,
        num_nodes: int,
        state: bool,
        grace_s: float | None,
        only: Collection[int] | None = None,
    ) -> None:
        self.folder, self.state = folder, state
        (folder / "experiment.toml").write_text(experiment)
        self.addresses = free_addresses(num_nodes)
        places = tuple((i,) for i in range(num_nodes))
        fleet = FleetFile("fleet", Path("experiment.toml"), self.addresses, places)
        (folder / "fleet.toml").write_text(fleet.to_toml())
        self.processes: dict[int, subprocess.Popen[str]] = {}
        for node in range(num_nodes) if only is None else only:
            self.start(node, grace_s)

    def start(self, node: int, grace_s: float | None = None) -> None:
        command = [sys.executable, "-m", "edgefl.cli", "node", "--fleet", "fleet.toml", "--id", str(node)]
        if node == 0:
            command += ["--out", "run", "--json"]
        if self.state:
            command += ["--state", f"state-{node}"]
        if grace_s is not None:
            command += ["--grace", str(grace_s)]
        with self.log(node).open("ab") as log:
            self.processes[node] = subprocess.Popen(
                command, cwd=self.folder, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def log(self, node: int) -> Path:
        return self.folder / f"{node}.log"

    def until(self, condition: str, node: int) -> None:
        """Wait for words in a node's log."""
        deadline = time.monotonic() + START_S
        while not re.search(condition, self.log(node).read_text()):
            assert time.monotonic() < deadline, self.log(node).read_text()
            time.sleep(0.02)

    def until_rounds_are_saved(self) -> None:
        """Wait until the server has state to come back to."""
        deadline = time.monotonic() + START_S
        while not (self.folder / "state-0" / "state.safetensors").exists():
            assert time.monotonic() < deadline, self.log(0).read_text()
            time.sleep(0.02)

    def kill(self, node: int) -> None:
        self.processes[node].kill()
        self.processes[node].communicate()

    def ends(self) -> dict[int, int]:
        """The exit code of each process, by node, when all have ended."""
        self.said = {i: process.communicate(timeout=START_S)[0] for i, process in self.processes.items()}
        return {i: process.returncode for i, process in self.processes.items()}

    @property
    def summary(self) -> dict[str, object]:
        parsed: dict[str, object] = json.loads(self.said[0])
        return parsed

    def events(self) -> list[tuple[str, str]]:
        return [(row["kind"], row["node"]) for row in self.rows("events")]

    def rows(self, table: str) -> list[dict[str, str]]:
        """A table of the run's folder."""
        with (self.folder / "run" / f"{table}.csv").open(newline="") as file:
            return list(csv.DictReader(file))


@contextlib.contextmanager
def fleet(
    folder: Path,
    experiment: str,
    num_nodes: int,
    *,
    state: bool = False,
    grace_s: float | None = None,
    only: Collection[int] | None = None,
) -> Iterator[Fleet]:
    """Start them all, or some; those left at the end are killed.

    grace_s: a process that is away longer is gone.
    """
    started = Fleet(folder, experiment, num_nodes, state, grace_s, only)
    try:
        yield started
    finally:
        for process in started.processes.values():
            process.kill()
            process.communicate()
