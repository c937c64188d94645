"""Models between two processes over loopback, beside plain ways to move the same bytes.

A model of 100 MB with its checksum, against gRPC streams of raw bytes with the same checksum and against a
TCP socket; peak memory of the receiver beyond the model; the round trip of 1 KB against gRPC's unary calls;
and how long 1 KB takes while a model is on its way over a link of 50 Mbit/s.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import torch
from support.measure import Line, arguments, show

from edgefl.allocator import keep_memory
from edgefl.messages import Codec, Message
from edgefl.parameters import Layout, Vector
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.local import free_ports
from edgefl.runtimes.grpc.transport import Transport

SIZE = 25_000_000
MODEL_BYTES = 4 * SIZE
CHUNK = 1 << 20
LAYOUT = Layout.of_shapes([("w", (SIZE,))])
ROUND_TRIPS = 300


@dataclass(frozen=True)
class Whole(Message):
    """A model."""

    parameters: Vector


@dataclass(frozen=True)
class Echo(Message):
    """1 KB, there and back."""

    max_size = {"data": 4096}
    data: bytes


def transport(index: int, ports: list[int], on_message: Callable[..., None], **more: Any) -> Transport:
    return Transport(
        index=index,
        addresses=[f"127.0.0.1:{port}" for port in ports],
        nodes_of=[[0], [1]],
        codec=Codec([Whole, Echo], [LAYOUT]),
        run_id="wire",
        digest="wire",
        on_message=on_message,
        on_gone=lambda node: None,
        on_back=lambda node, life: None,
        on_control=lambda process, kind, body: None,
        limits=Limits(),
        **more,
    )


# --- the other process ---------------------------------------------------------------------------


def serve(kind: str, ports: list[int], pipe: Connection) -> None:
    """The receiving process of each way."""
    keep_memory()
    if kind == "edgefl":
        asyncio.run(_serve_edgefl(ports, pipe))
    elif kind == "tcp":
        _serve_tcp(ports[1], pipe)
    else:
        asyncio.run(_serve_grpc(ports[1], pipe))


async def _serve_edgefl(ports: list[int], pipe: Connection) -> None:
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is counted from here on
    here: list[Transport] = []

    def received(_: int, message: Message) -> None:
        if isinstance(message, Echo):
            here[0].send(1, 0, Echo(message.data), on_left=_nothing, on_delivered=_nothing)

    here.append(transport(1, ports, received))
    pipe.send("ready")
    await here[0].start()
    await asyncio.to_thread(pipe.recv)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    pipe.send(peak * 1024 - before)
    await here[0].close()


async def _serve_grpc(port: int, pipe: Connection) -> None:
    async def upload(chunks: AsyncIterator[bytes], _: object) -> bytes:
        target, at, checksum = np.empty(MODEL_BYTES, np.uint8).data, 0, 0
        async for chunk in chunks:
            target[at : at + len(chunk)] = chunk
            checksum = zlib.crc32(chunk, checksum)
            at += len(chunk)
        return checksum.to_bytes(4, "little")

    async def echo(data: bytes, _: object) -> bytes:
        return data

    server = grpc.aio.server()
    handlers = {
        "Upload": grpc.stream_unary_rpc_method_handler(upload),
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("plain", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    pipe.send(0)
    await server.stop(None)


def _serve_tcp(port: int, pipe: Connection) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        pipe.send("ready")
        connection, _ = listener.accept()
        with connection:
            target = memoryview(bytearray(MODEL_BYTES))
            for _ in range(pipe.recv()):
                at = 0
                while at < MODEL_BYTES:
                    at += connection.recv_into(target[at:], MODEL_BYTES - at)
                connection.sendall(b"k")
    pipe.recv()
    pipe.send(0)


def _nothing(*_: object) -> None:
    """Nobody waits."""


# --- this process ----------------------------------------------------------------------------------


async def edgefl_times(ports: list[int], repeats: int, pipe: Connection) -> dict[str, float]:
    """Seconds of a model, of a round trip, and the receiver's peak bytes beyond one model."""
    answered = asyncio.Event()
    here = transport(0, ports, lambda _, message: answered.set())
    await here.start()
    vector = Vector(LAYOUT, torch.rand(SIZE))
    models = []
    for _ in range(repeats + 1):
        delivered = asyncio.Event()
        start = time.perf_counter()
        here.send(0, 1, Whole(vector), on_left=_nothing, on_delivered=lambda _, event=delivered: event.set())
        await delivered.wait()
        models.append(time.perf_counter() - start)
    trips = []
    for _ in range(ROUND_TRIPS):
        answered.clear()
        start = time.perf_counter()
        here.send(0, 1, Echo(bytes(1000)), on_left=_nothing, on_delivered=_nothing)
        await answered.wait()
        trips.append(time.perf_counter() - start)
    pipe.send("end")
    peak = await asyncio.to_thread(pipe.recv)
    await here.close()
    return {
        "model": statistics.median(models[1:] or models),
        "trip": statistics.median(trips),
        "peak": peak - MODEL_BYTES,
    }


async def beside_a_model(ports: list[int]) -> float:
    """Seconds that 1 KB takes, there and back, while a model leaves over a shaped uplink; a median."""
    answered = asyncio.Event()
    here = transport(0, ports, lambda _, message: answered.set(), uplink_bytes_per_s=50e6 / 8)
    await here.start()
    model = here.send(0, 1, Whole(Vector(LAYOUT, torch.zeros(SIZE))), on_left=_nothing, on_delivered=_nothing)
    await asyncio.sleep(1.0)
    trips = []
    for _ in range(20):
        answered.clear()
        start = time.perf_counter()
        here.send(0, 1, Echo(bytes(1000)), on_left=_nothing, on_delivered=_nothing)
        await answered.wait()
        trips.append(time.perf_counter() - start)
    model.cancel()
    await here.close()
    return statistics.median(trips)


def shaped_peak() -> float | None:
    """The receiver's peak bytes beyond one model on a link of 50 Mbit/s that the kernel shapes, in a network
    namespace of its own; None where that cannot be had."""
    link = "ip link set lo up && tc qdisc add dev lo root tbf rate 50mbit burst 256kb latency 200ms"
    code = "import wire; print(wire.peak_alone())"
    inside = f'{link} && exec "$0" -c "{code}"'
    try:
        done = subprocess.run(
            ["unshare", "--net", "sh", "-c", inside, sys.executable],
            cwd=Path(__file__).parent, capture_output=True, text=True,
        )  # fmt: skip
    except FileNotFoundError:
        return None
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def peak_alone() -> float:
    """The receiver's peak bytes beyond one model, which is sent once."""
    keep_memory()
    found = {}
    for ports, pipe in with_server("edgefl"):
        found = asyncio.run(edgefl_times(ports, 0, pipe))
    return found["peak"]


async def grpc_times(port: int, repeats: int) -> dict[str, float]:
    """Seconds of the same bytes in a raw stream, and of a unary call in asyncio."""
    data = memoryview(np.random.default_rng(0).random(SIZE, np.float32)).cast("B")

    async def chunks() -> AsyncIterator[bytes]:
        checksum = 0
        for at in range(0, MODEL_BYTES, CHUNK):
            chunk = bytes(data[at : at + CHUNK])
            checksum = zlib.crc32(chunk, checksum)
            yield chunk

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as calls:
        upload, echo = calls.stream_unary("/plain/Upload"), calls.unary_unary("/plain/Echo")
        models, trips = [], []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            await upload(chunks())
            models.append(time.perf_counter() - start)
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            await echo(bytes(1000))
            trips.append(time.perf_counter() - start)
    return {"model": statistics.median(models[1:]), "trip": statistics.median(trips)}


def grpc_sync_trip(port: int) -> float:
    """Seconds of a unary call from a thread."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as calls:
        echo, trips = calls.unary_unary("/plain/Echo"), []
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            echo(bytes(1000))
            trips.append(time.perf_counter() - start)
    return statistics.median(trips)


def tcp_time(port: int, repeats: int, pipe: Connection) -> float:
    """Seconds of the same bytes over a socket, without a checksum."""
    data = memoryview(np.random.default_rng(0).random(SIZE, np.float32)).cast("B")
    found = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        pipe.send(repeats + 1)
        for _ in range(repeats + 1):
            start = time.perf_counter()
            connection.sendall(data)
            connection.recv(1)
            found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def with_server(kind: str) -> Iterator[tuple[list[int], Connection]]:
    """The receiving process, for as long as the caller asks for it."""
    ports = free_ports(2)
    mine, other = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(kind, ports, other))
    process.start()
    mine.recv()
    yield ports, mine
    process.join(20)
    process.kill()


def measure(turns: int) -> dict[str, float]:
    """One turn of every way after the other, several times; medians."""
    rows: list[dict[str, float]] = []
    for _ in range(turns):
        row: dict[str, float] = {}
        for ports, pipe in with_server("edgefl"):
            row |= asyncio.run(edgefl_times(ports, 3, pipe))
        for ports, pipe in with_server("grpc"):
            raw = asyncio.run(grpc_times(ports[1], 3))
            row |= {"raw": raw["model"], "unary": min(raw["trip"], grpc_sync_trip(ports[1]))}
            pipe.send("end")
            pipe.recv()
        for ports, pipe in with_server("tcp"):
            row["tcp"] = tcp_time(ports[1], 3, pipe)
            pipe.send("end")
            pipe.recv()
        rows.append(row)
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    options = arguments(__doc__ or "")
    keep_memory()
    found = measure(options.repeats)
    for ports, pipe in with_server("edgefl"):
        shaped = asyncio.run(beside_a_model(ports))
        pipe.send("end")
        pipe.recv()
    thin = shaped_peak()
    speed, trip = MODEL_BYTES / 1e6 / found["model"], found["trip"]
    raw, tcp, peak = found["raw"] / found["model"], found["tcp"] / found["model"], found["peak"] / 1e6
    beside = "1 KB there and back beside a model, 50 Mbit/s"
    lines = [
        Line("model of 100 MB", speed, "MB/s", "raw gRPC stream", raw, 0.85, 0.95),
        Line("  beside a socket", speed, "MB/s", "TCP", tcp, 0.35, 0.6),
        Line("peak memory beyond the model", peak, "MB", "", None, 40, 16, True),
        *(
            ()
            if thin is None
            else [Line("  on a link of 50 Mbit/s", thin / 1e6, "MB", "", None, 40, 16, True)]
        ),
        Line("1 KB there and back", 1e6 * trip, "us", "unary call", trip / found["unary"], 1.5, 1.1, True),
        Line(beside, shaped, "s", "", None, 0.5, 0.1, True),
    ]
    show(lines, options.json)


if __name__ == "__main__":
    main()
