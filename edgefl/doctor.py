"""Is this machine fit for edgefl? The checks need nothing but Python: they run where edgefl does not.

Native modules (PyTorch, gRPC) are imported in a child process: a build that this processor cannot run kills
the child, and its signal is the finding.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "warn", "fail"]

MIB, GIB = 1 << 20, 1 << 30
CHILD_TIMEOUT_S = 120.0
REACH_TIMEOUT_S = 5.0
OLDEST_PYTHON = (3, 11)
ON_32_BIT = (
    "edgefl needs a 64-bit operating system: PyTorch has no builds for 32-bit ones. "
    "On a Raspberry Pi 3, 4, 5 or Zero 2 install Raspberry Pi OS (64-bit)"
)
EXTRAS = {"data": ("sklearn",), "report": ("pandas",)}
"""Optional modules by the extra that installs them."""
TORCH = "import torch; a = torch.ones(64, 64); assert (a @ a).sum() == 64**3; print(torch.__version__)"
GRPC = "import grpc; from grpc._cython import cygrpc; print(grpc.__version__)"


@dataclass(frozen=True)
class Finding:
    """What one check found, and what to do about it (empty when there is nothing to do)."""

    check: str
    state: State
    found: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        """For machines."""
        return asdict(self)


def examine(addresses: Sequence[str] = (), runs: Path = Path("runs")) -> Iterator[Finding]:
    """All checks, one by one as they are done. addresses: "HOST:PORT" to reach. runs: where runs are kept."""
    checks: tuple[Callable[[], Finding], ...] = (
        check_python,
        lambda: check_native("torch", TORCH, "pip install 'torch>=2.6,<2.11' (the builds for small boards)"),
        lambda: check_native("grpc", GRPC, "pip install --force-reinstall --only-binary :all: grpcio"),
        check_kernel,
        check_processors,
        check_memory,
        check_home,
        lambda: check_writable("runs", runs, "name another folder with --out"),
        lambda: check_disk(runs),
    )
    for check in checks:
        yield check()
    for extra, modules in EXTRAS.items():
        yield check_extra(extra, modules)
    for address in addresses:
        yield check_reach(address)


def check_python() -> Finding:
    """Python's version and word size."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.maxsize < 2**32:
        return Finding("python", "fail", f"{found}, 32 bit", ON_32_BIT)
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", "fail", found, "edgefl needs Python 3.11 or newer")
    return Finding("python", "ok", found)


def check_native(name: str, code: str, advice: str, timeout_s: float = CHILD_TIMEOUT_S) -> Finding:
    """Run `code` in a child: its last line is the version; its signal or last error, what is wrong."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "fail", f"no answer in {timeout_s:g} s", advice)
    if child.returncode < 0:
        return Finding(name, "fail", f"its import is ended by {_signal(-child.returncode)}", advice)
    lines = (child.stdout if child.returncode == 0 else child.stderr).strip().splitlines()
    last = lines[-1] if lines else f"exit code {child.returncode}"
    return Finding(name, "ok", last) if child.returncode == 0 else Finding(name, "fail", last, advice)


def _signal(number: int) -> str:
    name = signal.Signals(number).name
    if name == "SIGILL":
        return "SIGILL: this build uses instructions that the processor lacks"
    return f"{name}: out of memory?" if name == "SIGKILL" else name


def kernel_is_compiled() -> bool:
    """Whether virtual time's event kernel is compiled, and not interpreted."""
    spec = importlib.util.find_spec("edgefl.runtimes.interpreter")
    return spec is not None and spec.origin is not None and not spec.origin.endswith(".py")


def check_kernel() -> Finding:
    """How virtual time's event kernel runs."""
    if kernel_is_compiled():
        return Finding("kernel", "ok", "compiled")
    return Finding("kernel", "ok", "interpreted; `make compile` in a clone makes virtual time faster")


def check_processors() -> Finding:
    """Processors that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("processors", "ok", f"{usable} usable of {os.cpu_count()}")


def check_memory() -> Finding:
    """Memory that is free now, within the container's limit where there is one."""
    try:
        import psutil
    except ImportError as error:
        return Finding("memory", "warn", f"not known: {error}", "pip install psutil")
    memory = psutil.virtual_memory()
    limits = [memory.available, *_container_limits()]
    found = f"{min(limits) / GIB:.1f} GiB available of {min(memory.total, *limits[1:]) / GIB:.1f} GiB"
    if min(limits) < 400 * MIB:
        return Finding(
            "memory", "warn", found, "PyTorch alone takes about 250 MB: close programs or add swap"
        )
    return Finding("memory", "ok", found)


def _container_limits() -> Iterator[int]:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or the word "max"
            yield int(Path(file).read_text())


def _cache() -> Path:
    """Where downloaded data is kept (`edgefl.data.download.cache_folder`, without importing it)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())


def check_home() -> Finding:
    """Whether downloaded data can be kept."""
    advice = "set HOME or XDG_CACHE_HOME to a folder you may write to"
    try:
        return check_writable("home", _cache(), advice)
    except RuntimeError as error:
        return Finding("home", "warn", str(error), advice)


def check_writable(name: str, folder: Path, advice: str) -> Finding:
    """Whether files can be made in a folder, or in the nearest one above it that exists."""
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return Finding(name, "ok", f"{place} is writable")
    except OSError as error:
        return Finding(name, "warn", f"{place}: {error.strerror or error}", advice)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def check_disk(folder: Path) -> Finding:
    """Free space where runs are kept."""
    free = shutil.disk_usage(_existing(folder)).free
    found = f"{free / GIB:.1f} GiB free"
    if free < 100 * MIB:
        return Finding("disk", "fail", found, "a run needs room for its events and its model: free some")
    return Finding("disk", "ok" if free > GIB else "warn", found, "" if free > GIB else "little is left")


def check_extra(extra: str, modules: Sequence[str]) -> Finding:
    """Whether the modules of an optional extra are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            extra, "warn", f"not installed: {', '.join(missing)}", f"pip install 'edgefl[{extra}]'"
        )
    return Finding(extra, "ok", ", ".join(modules))


def check_reach(address: str, timeout_s: float = REACH_TIMEOUT_S) -> Finding:
    """Whether a TCP connection to "HOST:PORT" opens (over IPv6 or IPv4), and if not, what stands between."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        return Finding(address, "fail", "not an address", "write HOST:PORT, such as 192.168.1.10:9443")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as opened:
            return Finding(address, "ok", f"reachable at {opened.getpeername()[0]}")
    except socket.gaierror:
        return Finding(address, "fail", f"the name {host} is not known", "check the name, or use its address")
    except ConnectionRefusedError:
        found = f"{host} is there, nothing listens on port {port}"
        return Finding(address, "fail", found, "start it there first, or check the port")
    except TimeoutError:
        advice = f"a firewall drops port {port}, or the machine is off"
        return Finding(address, "fail", f"no answer in {timeout_s:g} s", advice)
    except OSError as error:
        return Finding(address, "fail", error.strerror or str(error), "check the network between the two")
