"""Labs that are really made: what their links do, and that nothing of them stays. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgefl.errors import RunError
from edgefl.experiment.config import load_experiment
from edgefl.experiment.runner import run_experiment
from edgefl.lab import build, state, system
from edgefl.lab.hosts import lab_hosts
from edgefl.lab.layout import Layout
from edgefl.network import Access, NetworkPlan, make_topology

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("tc"),
        reason="needs root and iproute2",
    ),
]
NAME = f"t{os.getpid()}"
FAST = Access(up_bytes_per_s=2_500_000, down_bytes_per_s=5_000_000, latency_s=0.02)
SLOW = Access(up_bytes_per_s=500_000, down_bytes_per_s=1_000_000, latency_s=0.01)
NETWORK = NetworkPlan(make_topology("complete", 3, 0), (FAST, SLOW, FAST))


def leftovers(name: str = NAME) -> list[str]:
    """Whatever of a lab is still there."""
    there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    names = [line for line in there.splitlines() if line.startswith(f"edgefl-{name}-")]
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    names += [
        line for line in running.splitlines() if f"edgefl-{name}-" in line or f"guard down {name}" in line
    ]
    return names + ([str(state.path(name))] if state.path(name).exists() else [])


@pytest.fixture
def lab() -> Iterator[Layout]:
    before = interfaces()
    with build.kept_up(NETWORK, NAME) as made:
        yield made
    assert leftovers() == []
    assert interfaces() == before


def interfaces() -> str:
    """The host's own interfaces with their queueing disciplines."""
    return subprocess.run(["tc", "qdisc", "show"], capture_output=True, text=True, check=True).stdout


def socket_at(lab: Layout, node: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A socket on a node's network, bound to its address."""
    with system.entered(lab.seats[node].namespace):
        made = socket.socket(socket.AF_INET, kind)
    made.bind((lab.seats[node].ip, 0))
    return made


def flow_s(lab: Layout, sender: int, receiver: int, num_bytes: int) -> float:
    """Seconds from the first byte of a TCP stream to the last at the receiver."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket_at(lab, receiver))
        listener.listen()
        here = stack.enter_context(socket_at(lab, sender))
        here.connect(listener.getsockname())
        there = stack.enter_context(listener.accept()[0])
        thread = threading.Thread(target=here.sendall, args=(bytes(num_bytes),))
        thread.start()
        num_bytes -= len(there.recv(1))
        began = time.monotonic()
        while num_bytes:
            num_bytes -= len(there.recv(min(num_bytes, 1 << 20)))
        took = time.monotonic() - began
        thread.join()
        return took


def round_trip_s(lab: Layout, a: int, b: int) -> float:
    """The median round trip of a datagram."""
    with socket_at(lab, a, socket.SOCK_DGRAM) as one, socket_at(lab, b, socket.SOCK_DGRAM) as other:
        trips = []
        for _ in range(20):
            began = time.monotonic()
            one.sendto(b"x", other.getsockname())
            other.sendto(*other.recvfrom(1))
            one.recv(1)
            trips.append(time.monotonic() - began)
        return statistics.median(trips)


def test_links_do_what_the_plan_says(lab: Layout) -> None:
    # The first megabyte may be in slow start; a tenth is what a busy machine may cost.
    for sender, receiver in ((0, 2), (1, 0), (0, 1)):
        planned = NETWORK.rate_bytes_per_s(sender, receiver)
        size = int(4 * planned)
        assert size / flow_s(lab, sender, receiver, size) == pytest.approx(planned, rel=0.1)
    assert round_trip_s(lab, 0, 2) == pytest.approx(0.08, abs=0.01)
    assert round_trip_s(lab, 0, 1) == pytest.approx(0.06, abs=0.01)


def test_up_and_down() -> None:
    made = build.up(NETWORK, NAME)
    try:
        found = build.status(NAME)
        assert found is not None
        assert (found["missing"], found["owner"]) == ([], None)
        assert [seat["processes"] for seat in found["seats"]] == [0, 0, 0]
        with build.kept_up(NETWORK, NAME) as same:
            assert same == made
            sleeper = subprocess.Popen(system.inside(made.seats[1].namespace, ["sleep", "60"]))
        assert sleeper.wait(5) == -signal.SIGTERM
        assert build.status(NAME) is not None
    finally:
        assert build.down(NAME)
    assert leftovers() == []
    assert not build.down(NAME)


def test_nothing_stays_when_a_command_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run, count = system.run, iter(range(1000))

    def failing(command: tuple[str, ...]) -> None:
        run(command if next(count) != 12 else ("tc", "nonsense"))

    monkeypatch.setattr(system, "run", failing)
    with pytest.raises(RunError, match="nonsense"):
        build.up(NETWORK, NAME)
    assert leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_stays_when_the_process_is_ended(number: int) -> None:
    code = f"""
        import signal, sys, time
        from edgefl.lab.build import kept_up
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_lab_links import NETWORK
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with kept_up(NETWORK, {NAME!r}):
            print("up", flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert leftovers()
        process.send_signal(number)
    deadline = time.monotonic() + 30
    while leftovers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert leftovers() == []


def test_a_run_in_a_lab(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(
        """
        [method]
        name = "fedavg"
        [fleet]
        devices = { laptop = 2 }
        [network]
        link = { up = "500 kB/s", down = "1 MB/s", latency = "10 ms" }
        [data]
        name = "synthetic"
        num_owners = 2
        examples_per_owner = 40
        [model]
        name = "linear"
        [train]
        local_steps = 1
        [stop]
        rounds = 5
        """
    )
    result = run_experiment(
        load_experiment(file), runtime="local", out=tmp_path / "run",
        housing=lambda network: lab_hosts(network, NAME),
    )  # fmt: skip
    assert result.summary["status"] == "finished"
    # Five rounds cross the links twice each: 2 x (5 + 10) ms at least.
    assert result.summary["time_s"] > 5 * 0.03
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["network"]["lab"]["rates"] == "tbf"
    assert record["summary"]["predicted"]["sent_bytes"]["error"] == 0
    # Each device measured its way to the server when it joined; a tenth is what a busy machine may cost.
    assert sorted(record["links"]) == ["1", "2"]
    for link in record["links"].values():
        assert link["latency_s"] == pytest.approx(0.015, abs=0.01)
        assert link["up_bytes_per_s"] == pytest.approx(500_000, rel=0.1)
        assert link["down_bytes_per_s"] == pytest.approx(1_000_000, rel=0.1)
    assert leftovers() == []
