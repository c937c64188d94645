"""What a lab asks of the operating system: programs, rights, namespaces, and who runs in them."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from edgefl.errors import ConfigError, RunError
from edgefl.lab.layout import Command

_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")
_ENDING_S = 5.0
"""Seconds that a process in a namespace has to end by itself."""


def require() -> None:
    """Raise ConfigError, one line, where this machine cannot have a lab."""
    if sys.platform != "linux":
        raise ConfigError("lab", sys.platform, "Linux: a lab is made of its network namespaces")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise ConfigError("lab", f"no {program}", "the programs ip and tc: apt-get install iproute2")
    if os.geteuid() != 0:
        raise ConfigError("lab", f"user {os.geteuid()}", "root: network namespaces need it (sudo edgefl ...)")


def run(command: Command) -> None:
    """Run one command. Raises RunError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RunError(f"{' '.join(command)}: {said[0]}")


def has_netem() -> bool:
    """Whether the kernel has netem, tried on the loopback device of a namespace that ends with the trial."""
    trial = ("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    try:
        return subprocess.run(("unshare", "--net", *trial), capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def has_tun() -> bool:
    return Path("/dev/net/tun").exists()


def existing(namespaces: Iterable[str]) -> list[str]:
    """Those of the namespaces that there are."""
    return sorted(name for name in namespaces if (_NAMESPACES / name).exists())


def inside(namespace: str, command: Sequence[str]) -> list[str]:
    """The command that runs another one in a namespace."""
    return ["ip", "netns", "exec", namespace, *command]


def processes(namespace: str) -> list[int]:
    """Who runs in a namespace, but for this process."""
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [pid for pid in map(int, done.stdout.split()) if pid != os.getpid()]


def end_processes(namespaces: Collection[str]) -> None:
    """End all that runs in these namespaces: asked first, killed when it does not go."""
    for number, patience_s in ((signal.SIGTERM, _ENDING_S), (signal.SIGKILL, _ENDING_S)):
        pids = [pid for name in namespaces for pid in processes(name)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while pids and time.monotonic() < deadline:
            time.sleep(0.05)
            pids = [pid for name in namespaces for pid in processes(name)]
        if not pids:
            return


def delete(namespace: str) -> None:
    """Delete a namespace and with it every interface that lies in it."""
    run(("ip", "netns", "del", namespace))


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Inside, sockets that this thread and threads started by it open belong to the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open("rb") as home, (_NAMESPACES / namespace).open("rb") as there:
        _move(libc, there.fileno())
        try:
            yield
        finally:
            _move(libc, home.fileno())


def _move(libc: ctypes.CDLL, file: int) -> None:
    if libc.setns(file, _CLONE_NEWNET):
        raise RunError(f"the network namespace cannot be entered: {os.strerror(ctypes.get_errno())}")
