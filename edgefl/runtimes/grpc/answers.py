"""The probe service of a process: what it answers to others that measure the way to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from edgefl.messages import wire
from edgefl.network.measured import steady_rate
from edgefl.runtimes.grpc.limits import MIB

MOST_BYTES, MOST_S, MOST_ECHOES = 64 * MIB, 10.0, 1000
"""Whatever it is asked."""
CHUNK = bytes(16 * 1024)


class Answers:
    """Echoes at once; bulk transfers one after the other."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def handler(self) -> Any:
        """What a gRPC server is given."""
        methods = {
            "Echo": grpc.stream_stream_rpc_method_handler(
                self._echo, wire.EchoRequest.FromString, wire.EchoResponse.SerializeToString
            ),
            "Upload": grpc.stream_unary_rpc_method_handler(
                self._upload, wire.UploadRequest.FromString, wire.UploadResponse.SerializeToString
            ),
            "Download": grpc.unary_stream_rpc_method_handler(
                self._download, wire.DownloadRequest.FromString, wire.DownloadResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(wire.PROBE_SERVICE, methods)

    async def _echo(self, requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        count = 0
        async for request in requests:
            yield wire.EchoResponse(number=request.number)
            count += 1
            if count >= MOST_ECHOES:
                return

    async def _upload(self, requests: AsyncIterator[Any], _: object) -> Any:
        loop = asyncio.get_running_loop()
        async with self._turn:
            marks: list[tuple[float, int]] = []
            async for request in requests:
                before = marks[-1][1] if marks else 0
                marks.append((loop.time(), before + len(request.data)))
                if marks[-1][1] >= MOST_BYTES or marks[-1][0] >= marks[0][0] + MOST_S:
                    break
        received = marks[-1][1] if marks else 0
        return wire.UploadResponse(received_bytes=received, rate_bytes_per_s=steady_rate(marks))

    async def _download(self, request: Any, _: object) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        left = min(MOST_BYTES, request.most_bytes)
        most_s = min(MOST_S, request.most_time.ToTimedelta().total_seconds())
        async with self._turn:
            end_s = loop.time() + most_s
            while left > 0 and loop.time() < end_s:
                yield wire.DownloadResponse(data=CHUNK[: min(len(CHUNK), left)])
                left -= len(CHUNK)
