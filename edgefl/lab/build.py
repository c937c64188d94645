"""Labs go up and come down. Coming down needs no more than the lab's file, so it works after any end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from edgefl.errors import ConfigError, RunError
from edgefl.lab import state, system
from edgefl.lab.layout import Layout, build_commands, layout
from edgefl.lab.state import NAME, State
from edgefl.network import NetworkPlan

_GUARD_S = 60.0
"""A guard has ended by then: who runs in the lab has 10 s of it to end."""


def up(network: NetworkPlan, name: str = NAME) -> Layout:
    """Make the lab of a network; it stays until `down`.

    Raises ConfigError where this machine cannot have it or it is up already, RunError for what a command
    refused; then nothing of it is left.
    """
    drawn = _drawn(network, name)
    _claim(drawn, owner=None)
    with _guarded("down", name) as keep:
        _build(drawn)
        keep()
    return drawn


@contextmanager
def kept_up(network: NetworkPlan, name: str = NAME) -> Iterator[Layout]:
    """The lab of a network for as long as the block runs, or the one that is up where its links are the same.

    Raises as `up` does, and ConfigError where a lab with other links is up.
    """
    system.require()
    there = state.read(name)
    if there is None:
        drawn = _drawn(network, name)
        _claim(drawn, owner=os.getpid())
        with _guarded("down", name):
            _build(drawn)
            yield drawn
        return
    if there.layout.seats != layout(network, name, has_netem=False).seats:
        raise ConfigError("--lab", f"a lab of {len(there.layout.seats)} other links is up", "edgefl lab down")
    if there.owner is not None:
        raise ConfigError(
            "--lab", f"process {there.owner} runs in the lab", "wait for it, or edgefl lab down"
        )
    with _guarded("clear", name):
        yield there.layout


def down(name: str = NAME) -> bool:
    """Take a lab down: its processes, namespaces and their interfaces. False where there was none."""
    system.require()
    with state.turn():
        there = state.read(name)
        if there is None:
            return False
        namespaces = system.existing(there.layout.namespaces)
        system.end_processes(namespaces)
        for namespace in namespaces:
            system.delete(namespace)
        state.forget(name)
        return True


def clear(name: str = NAME) -> None:
    """End what runs at a lab's nodes; the lab stays."""
    there = state.read(name)
    if there is not None:
        system.end_processes(system.existing(seat.namespace for seat in there.layout.seats))


def status(name: str = NAME) -> dict[str, Any] | None:
    """What is up: the lab's links and how many processes run at each node; None without a lab."""
    system.require()
    there = state.read(name)
    if there is None:
        return None
    rows = there.layout.as_dict()
    for seat, row in zip(there.layout.seats, rows["seats"], strict=True):
        row |= {"address": seat.address, "processes": len(system.processes(seat.namespace))}
    missing = sorted(set(there.layout.namespaces) - set(system.existing(there.layout.namespaces)))
    return {**rows, "since": there.since, "owner": there.owner, "missing": missing}


def _drawn(network: NetworkPlan, name: str) -> Layout:
    """The lab that is to be made. Raises ConfigError where it cannot be."""
    system.require()
    drawn = layout(network, name, has_netem=system.has_netem())
    if state.read(name) is None and (taken := system.existing(drawn.namespaces)):
        accepted = "a free name: this namespace is not the lab's own (ip netns del removes it)"
        raise ConfigError("lab", taken[0], accepted)
    if drawn.delays == "switch" and not system.has_tun():
        accepted = "a kernel with netem, or /dev/net/tun, for links with latency or loss"
        raise ConfigError("lab", "neither netem nor /dev/net/tun", accepted)
    return drawn


def _claim(drawn: Layout, owner: int | None) -> None:
    """Write the lab's file, before anything is made."""
    state.claim(State(drawn, owner, datetime.now(UTC).isoformat(timespec="seconds")))


@contextmanager
def _guarded(word: str, name: str) -> Iterator[Callable[[], object]]:
    """Inside, a guard watches over this process; it acts when the block or the process ends, however it does.

    Yields what makes the guard leave everything as it is.
    """
    command = [sys.executable, "-m", "edgefl.lab.guard", word, name]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert guard.stdin is not None
    pipe = guard.stdin
    try:
        yield lambda: pipe.write(b"keep")
    finally:
        with suppress(BrokenPipeError):
            pipe.close()
        guard.wait(_GUARD_S)


def _build(drawn: Layout) -> None:
    """Make what the drawing says."""
    for command in build_commands(drawn):
        system.run(command)
    if drawn.delays == "switch":
        _start_switch(drawn)


def _start_switch(made: Layout) -> None:
    """Start the program that carries frames; it goes on by itself, and ends with its namespace."""
    command = system.inside(made.switch, [sys.executable, "-m", "edgefl.lab.switch"])
    done = subprocess.run(
        command, input=json.dumps(made.as_dict()), capture_output=True, text=True, start_new_session=True
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise RunError(f"the lab's switch did not start: {said[-1]}")
