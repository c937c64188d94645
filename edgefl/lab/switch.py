"""The switch of a lab whose kernel has no netem: python -m edgefl.lab.switch, in the switch's namespace.

Reads its ports from standard input, one JSON object: {"seats": [{"node", "latency_s", "jitter", "loss"}]}.
Opens a TAP for each, tN, bridges it with bN, goes into the background, and carries frames between the TAPs
until it is ended. A frame from i to j waits the latencies of both, and is dropped with the losses of both. A
pair's latency is drawn anew ten times a second, as far as its jitter goes, and its frames never overtake each
other.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from edgefl.keyed import generator
from edgefl.lab.layout import mac

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_MOST_BYTES = 65535
_AT_ONCE = 64
"""Frames that are read from one port before the others have their turn."""
_REDRAW_S = 0.1
_MOST_LATE = 200_000
"""Frames that wait in the switch; more are dropped."""


@dataclass(frozen=True)
class Port:
    """One node's end in the switch: its latency one way, in seconds, the jitter of it, and loss."""

    latency_s: float
    jitter: float
    loss: float


class Delays:
    """When a frame that comes now leaves, by (sender, receiver)."""

    def __init__(self, ports: dict[int, Port], rng: np.random.Generator) -> None:
        self._ports, self._rng = ports, rng
        self._drawn: dict[tuple[int, int], tuple[float, float]] = {}
        self._last: dict[tuple[int, int], float] = {}
        self._loss = {
            (a, b): 1 - (1 - one.loss) * (1 - other.loss)
            for a, one in ports.items()
            for b, other in ports.items()
        }

    def due(self, pair: tuple[int, int], now: float) -> float | None:
        """The time at which the frame leaves; None for one that is lost."""
        loss = self._loss[pair]
        if loss and self._rng.random() < loss:
            return None
        latency_s, until = self._drawn.get(pair, (0.0, -1.0))
        if now >= until:
            latency_s = sum(self._one_way(self._ports[end]) for end in pair)
            self._drawn[pair] = latency_s, now + _REDRAW_S
        due = self._last[pair] = max(now + latency_s, self._last.get(pair, 0.0))
        return due

    def _one_way(self, port: Port) -> float:
        return port.latency_s * (1 + port.jitter * (2 * self._rng.random() - 1))


def carry(files: dict[int, int], delays: Delays) -> None:
    """Carry frames between the TAPs for ever. files: file descriptors by node."""
    node_of = {file: node for node, file in files.items()}
    by_mac = {bytes.fromhex(mac(node).replace(":", "")): node for node in files}
    late: list[tuple[float, int, int, bytes]] = []
    waiting, sequence = list(node_of), 0
    while True:
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, _, file, frame = heapq.heappop(late)
            with suppress(OSError):  # the port's queue is full: a frame is lost, as on any switch
                os.write(file, frame)
        pause_s = max(0.0, late[0][0] - now) if late else None
        for file in select.select(waiting, [], [], pause_s)[0]:
            sender, now = node_of[file], time.monotonic()
            for frame in _frames(file):
                receiver = by_mac.get(frame[:6])
                others = [n for n in files if n != sender] if receiver is None else [receiver]
                for one in others:
                    due = delays.due((sender, one), now)
                    if due is not None and len(late) < _MOST_LATE:
                        sequence += 1
                        heapq.heappush(late, (due, sequence, files[one], frame))


def _frames(file: int) -> list[bytes]:
    """What has come in, as much as is taken in one turn."""
    found = []
    with suppress(BlockingIOError):
        for _ in range(_AT_ONCE):
            found.append(os.read(file, _MOST_BYTES))
    return found


def _open_tap(node: int) -> int:
    """The TAP of a node, bridged with its port."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", f"t{node}".encode(), _IFF_TAP | _IFF_NO_PI))
    for change in (
        ("addrgenmode", "none"),
        ("txqueuelen", "10000"),
        ("master", f"b{node}"),
        ("up",),
    ):
        subprocess.run(["ip", "link", "set", f"t{node}", *change], check=True)
    return file


def _go_on_alone() -> None:
    """Go on in a child, so that whoever started the switch learns that all is ready."""
    if os.fork():
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in range(3):
        os.dup2(nothing, file)


def main() -> None:
    seats = json.load(sys.stdin)["seats"]
    ports = {s["node"]: Port(s["latency_s"], s["jitter"], s["loss"]) for s in seats}
    files = {node: _open_tap(node) for node in ports}
    _go_on_alone()
    with suppress(
        OSError, AttributeError
    ):  # frames are late when others compute; without the right, so be it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    # What is lost and late is drawn from one seed; when frames come is the wall clock's affair.
    carry(files, Delays(ports, generator(0, "lab switch")))


if __name__ == "__main__":
    main()
