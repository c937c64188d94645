"""Measuring the way between two processes, over the channel that their messages take.

Latency comes from round trips of a few bytes, rates from
two bulk transfers of bounded time and size, loss from what TCP had to send again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc

from edgefl.messages import wire
from edgefl.network.measured import MeasuredLink, latency_of, steady_rate
from edgefl.runtimes.grpc.answers import CHUNK
from edgefl.runtimes.grpc.endpoint import channel
from edgefl.runtimes.grpc.limits import MIB, Limits

log = logging.getLogger("edgefl.grpc")


@dataclass(frozen=True)
class Effort:
    """How much a measurement may take. rate_s, rate_bytes: each way. answer_s: until the other one serves."""

    echoes: int = 20
    rate_s: float = 2.0
    rate_bytes: int = 16 * MIB
    answer_s: float = 5.0
    patience_s: float = 15.0
    """For either way's rate, its turn included."""


BRIEF = Effort(echoes=5, rate_s=0.3, rate_bytes=4 * MIB, patience_s=3.0)
"""At the start of a run."""


async def measure(address: str, effort: Effort | None = None, limits: Limits | None = None) -> MeasuredLink:
    """Measure the way to the process that serves at "host:port".

    Raises TimeoutError where nobody serves there within `effort.answer_s`, grpc.aio.AioRpcError where what
    serves does not answer probes.
    """
    effort = effort or Effort()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with channel(address, limits or Limits()) as calls:
        async with asyncio.timeout(effort.answer_s):
            await calls.channel_ready()
        trips = await _round_trips(calls, effort)
        up, up_bytes = await _told(_up(calls, effort), effort)
        down, down_bytes = await _told(_down(calls, effort), effort)
        loss = await loop.run_in_executor(None, sent_again, address)
    latency_s, jitter = latency_of(trips)
    took_s = loop.time() - began_s
    return MeasuredLink(address, latency_s, jitter, up, down, loss, up_bytes + down_bytes, took_s)


async def measure_in_time(address: str, limits: Limits, over: asyncio.Event) -> MeasuredLink | None:
    """Measure the way to the process that leads, briefly, before this one serves: nothing else is under way
    here. None where it cannot be measured, or the run is over before."""
    log.info("measures the way to %s, which leads, when it serves", address)
    patience = replace(BRIEF, answer_s=limits.connect_timeout_s)
    probe = asyncio.create_task(measure(address, patience, limits))
    end = asyncio.create_task(over.wait())
    try:
        await asyncio.wait({probe, end}, return_when=asyncio.FIRST_COMPLETED)
        if not probe.done():
            return None
        found = probe.result()
        log.info("the way to %s: %s", address, found.as_table())
        return found
    except (grpc.aio.AioRpcError, TimeoutError) as error:
        log.warning("the way to %s cannot be measured: %s", address, error)
        return None
    finally:
        for task in (probe, end):
            task.cancel()
        await asyncio.gather(probe, end, return_exceptions=True)


async def _told(rate: Any, effort: Effort) -> tuple[float | None, int]:
    """A rate and the bytes that it took; none where the other process has no time for it."""
    try:
        async with asyncio.timeout(effort.patience_s):
            found: tuple[float | None, int] = await rate
            return found
    except TimeoutError:
        return None, 0


async def _round_trips(calls: Any, effort: Effort) -> list[float]:
    loop = asyncio.get_running_loop()
    method = calls.stream_stream(
        f"/{wire.PROBE_SERVICE}/Echo", wire.EchoRequest.SerializeToString, wire.EchoResponse.FromString
    )
    call = method(timeout=effort.patience_s)
    trips = []
    try:
        for number in range(effort.echoes + 1):
            left_s = loop.time()
            await call.write(wire.EchoRequest(number=number))
            if await call.read() is grpc.aio.EOF:
                break
            trips.append(loop.time() - left_s)
        await call.done_writing()
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        # The call has ended: after some trips because that is all the other gives, else its status says why.
        if not trips:
            await call.read()
            raise
    finally:
        call.cancel()
    return trips[1:]  # the first one opened the connection


async def _up(calls: Any, effort: Effort) -> tuple[float | None, int]:
    loop = asyncio.get_running_loop()

    async def chunks() -> AsyncIterator[Any]:
        end_s, left = loop.time() + effort.rate_s, effort.rate_bytes
        while left > 0 and loop.time() < end_s:
            yield wire.UploadRequest(data=CHUNK)
            left -= len(CHUNK)

    method = calls.stream_unary(
        f"/{wire.PROBE_SERVICE}/Upload", wire.UploadRequest.SerializeToString, wire.UploadResponse.FromString
    )
    answer = await method(chunks(), timeout=effort.patience_s)
    rate = answer.rate_bytes_per_s if answer.HasField("rate_bytes_per_s") else None
    return rate, answer.received_bytes


async def _down(calls: Any, effort: Effort) -> tuple[float | None, int]:
    loop = asyncio.get_running_loop()
    method = calls.unary_stream(
        f"/{wire.PROBE_SERVICE}/Download",
        wire.DownloadRequest.SerializeToString,
        wire.DownloadResponse.FromString,
    )
    request = wire.DownloadRequest(most_bytes=effort.rate_bytes)
    request.most_time.FromNanoseconds(round(1e9 * effort.rate_s))
    marks: list[tuple[float, int]] = []
    async for answer in method(request, timeout=effort.patience_s):
        marks.append((loop.time(), (marks[-1][1] if marks else 0) + len(answer.data)))
    return steady_rate(marks), marks[-1][1] if marks else 0


def sent_again(address: str) -> float | None:
    """The share of TCP segments that this process sent again to an address; None where `ss` is missing."""
    if shutil.which("ss") is None:
        return None
    host, _, port = address.rpartition(":")
    command = ["ss", "-tinpHO", "dst", f"{host}:{port}"]
    done = subprocess.run(command, capture_output=True, text=True)
    own = [line for line in done.stdout.splitlines() if f"pid={os.getpid()}," in line]
    sent = sum(int(n) for line in own for n in re.findall(r"\bdata_segs_out:(\d+)", line))
    again = sum(int(n) for line in own for n in re.findall(r"\bretrans:\d+/(\d+)", line))
    return again / sent if sent else None
