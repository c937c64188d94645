"""Measuring the way to another process, and answering those who do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.commands.shared import Json, command, emit, show
from edgefl.errors import ConfigError, RunError

if TYPE_CHECKING:
    from edgefl.network import MeasuredLink


@command
def probe(
    address: Annotated[
        str | None,
        typer.Argument(metavar="HOST:PORT", help="Where a node's process serves.", show_default=False),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Answer here until Ctrl-C, where no node runs.", show_default=False
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=10, help="For the rate of each way.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Measure latency, jitter, rates and loss to a process, over the channel that models take.

    Moves at most 16 MiB each way. Every node's process answers while it runs.
    """
    if (address is None) == (serve is None):
        raise ConfigError("HOST:PORT", address, "an address to measure the way to, or --serve HOST:PORT")
    _checked(address or serve or "")
    import asyncio

    if serve is not None:
        asyncio.run(_serve(serve))
        return
    assert address is not None
    found = asyncio.run(_measured(address, seconds))
    if as_json:
        emit(found.as_dict() | {"link": found.as_table()})
        return
    _show_link(found)


def _checked(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError("HOST:PORT", address, "such as 192.168.1.20:50051")


async def _measured(address: str, seconds: float) -> MeasuredLink:
    import grpc

    from edgefl.runtimes.grpc.measuring import Effort, measure

    try:
        return await measure(address, Effort(rate_s=seconds, patience_s=5 * seconds + 5))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise RunError(f"{address}: what serves there does not answer probes; is it edgefl?") from error
        raise RunError(f"{address}: {error.code().name}: {error.details()}") from error
    except TimeoutError as error:
        raise RunError(f"{address}: nobody serves there; edgefl doctor {address} says more") from error


async def _serve(address: str) -> None:
    import asyncio

    from edgefl.runtimes.grpc.endpoint import Endpoint
    from edgefl.runtimes.grpc.limits import Limits

    endpoint = Endpoint(None, Limits())
    try:
        await endpoint.start(address)
    except RuntimeError as error:
        raise ConfigError("--serve", address, "a free port at an address of this machine") from error
    typer.echo(f"answers probes at {address}; Ctrl-C ends it")
    try:
        await asyncio.Event().wait()
    finally:
        await endpoint.stop()


def _show_link(found: MeasuredLink) -> None:
    from edgefl.console import table
    from edgefl.experiment.report.units import scaled, share
    from edgefl.experiment.report.units import seconds as shown

    rows = [
        ("latency, one way", shown(found.latency_s)),
        ("jitter", share(found.jitter, 1)),
        ("up", scaled(found.up_bytes_per_s, "B/s")),
        ("down", scaled(found.down_bytes_per_s, "B/s")),
        ("sent again", "not available: ss is missing" if found.loss is None else f"{100 * found.loss:.2f} %"),
        ("moved, took", f"{scaled(found.num_bytes, 'B')}, {shown(found.took_s)}"),
    ]
    show(table((f"to {found.address}", ""), rows))
    typer.echo(f"as a link of [network]: {_as_toml(found.as_table())}")


def _as_toml(table: dict[str, Any]) -> str:
    from edgefl.experiment.toml import literal

    return "{ " + ", ".join(f"{key} = {literal(value)}" for key, value in table.items()) + " }"
