"""The gRPC server and channels of a process: their options, probes, health checking and reflection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from edgefl.messages.codec import MAX_HEADER_BYTES
from edgefl.messages.wire import EXCHANGE_SERVICE, PROBE_SERVICE
from edgefl.runtimes.grpc.answers import Answers
from edgefl.runtimes.grpc.limits import Limits

FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 2.0
_FRAME_SLACK_BYTES = MAX_HEADER_BYTES + 64 * 1024


class Endpoint:
    """A server of the exchange service, with probes of the way to it, health checking and reflection.

    exchange(request_iterator, context): carries one stream; frames are bytes on both sides. Without it, the
    server answers probes alone.
    """

    def __init__(self, exchange: Callable[[object, Any], Awaitable[None]] | None, limits: Limits) -> None:
        options = [
            *_options(limits),
            # Two processes on one port would each get some of the connections.
            ("grpc.so_reuseport", 0),
            # Who connects and says nothing, or opens no stream, gives its place back.
            ("grpc.server_handshake_timeout_ms", int(1000 * limits.hello_timeout_s)),
            ("grpc.max_connection_idle_ms", int(1000 * limits.idle_s)),
            ("grpc.max_concurrent_streams", limits.max_streams),
            # Less than the peers' keepalive, or their pings would be refused as too many.
            ("grpc.http2.min_ping_interval_without_data_ms", int(500 * limits.keepalive_s)),
        ]
        self._server = grpc.aio.server(options=options)
        self._health = health.aio.HealthServicer()
        handlers = [Answers().handler()]
        if exchange is not None:
            stream = {"Exchange": grpc.stream_stream_rpc_method_handler(exchange)}
            handlers.append(grpc.method_handlers_generic_handler(EXCHANGE_SERVICE, stream))
        self._server.add_generic_rpc_handlers(tuple(handlers))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (EXCHANGE_SERVICE, PROBE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, address: str) -> None:
        """Serve at "host:port". Raises RuntimeError when the address is taken or not of this machine."""
        self._server.add_insecure_port(address)
        await self._server.start()
        for name in ("", EXCHANGE_SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def retire(self) -> None:
        """Tell health checks that the end is near; streams go on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        await self._server.stop(grace=0.2)


def channel(address: str, limits: Limits) -> Any:
    """A channel of its own to another process's endpoint, to be used in an `async with`."""
    options = [
        *_options(limits),
        ("grpc.initial_reconnect_backoff_ms", int(1000 * FIRST_RETRY_S)),
        ("grpc.min_reconnect_backoff_ms", int(1000 * FIRST_RETRY_S)),
        ("grpc.max_reconnect_backoff_ms", int(1000 * LONGEST_RETRY_S)),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options=options)


def _options(limits: Limits) -> list[tuple[str, int]]:
    """What both ends are told alike."""
    most = limits.frame_bytes + _FRAME_SLACK_BYTES
    keepalive_ms = int(1000 * limits.keepalive_s)
    return [
        ("grpc.max_send_message_length", most),
        ("grpc.max_receive_message_length", most),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
