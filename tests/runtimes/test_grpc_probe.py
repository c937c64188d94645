"""Measuring the way to a process: what it says, what bounds it, and who answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from edgefl.cli import app
from edgefl.messages import wire
from edgefl.network import parse_link
from edgefl.network.measured import MeasuredLink, latency_of, steady_rate
from edgefl.runtimes.grpc import answers, measuring
from edgefl.runtimes.grpc.endpoint import Endpoint, channel
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.local import free_addresses
from edgefl.runtimes.grpc.measuring import Effort, measure
from edgefl.runtimes.grpc.place import Place

QUICK = Effort(echoes=5, rate_s=0.2, rate_bytes=1 << 20)


def served(use: Callable[[str], Awaitable[Any]]) -> Any:
    """What `use` makes of the address of a process that answers probes."""

    async def main() -> Any:
        (address,) = free_addresses(1)
        endpoint = Endpoint(None, Limits())
        await endpoint.start(address)
        try:
            return await use(address)
        finally:
            await endpoint.stop()

    return asyncio.run(main())


def test_a_process_is_measured_over_its_channel() -> None:
    found = served(lambda address: measure(address, QUICK))
    assert 0 < found.latency_s < 0.2
    assert 0 <= found.jitter < 1
    assert found.up_bytes_per_s > 1e6 and found.down_bytes_per_s > 1e6
    assert found.loss in (None, 0.0)
    # Each way moves what it may at most, and no more.
    assert found.num_bytes == 2 << 20


def test_a_measurement_is_a_link_of_the_experiment_file() -> None:
    link = MeasuredLink("h:1", 0.0123, 0.25, 2.5e6, 7.5e5, 0.002, 1, 1.0)
    read = parse_link(link.as_table())
    assert (read.up_bytes_per_s, read.down_bytes_per_s) == (2.5e6, 7.5e5)
    assert (read.latency_s, read.jitter, read.loss) == (0.0123, 0.25, 0.002)
    fast = MeasuredLink("h:1", 0.01, 0.0, 59.83e6, None, None, 0, 1.0)
    assert fast.as_table()["up"] == "59830 kB/s"
    unknown = MeasuredLink("h:1", 0.01, 0.0, None, None, None, 0, 1.0)
    assert unknown.as_table() == {"latency": "10 ms", "jitter": 0.0}


def test_rates_leave_out_the_beginning() -> None:
    # 100 bytes at once, then 10 a second: the burst is not the rate.
    marks = [(0.0, 100), *((0.5 * i, 100 + 5 * i) for i in range(1, 9))]
    assert steady_rate(marks) == pytest.approx(10.0)
    assert steady_rate(marks[:2]) is None
    assert steady_rate([(0.0, 1), (0.0, 2), (0.0, 3)]) is None


def test_latency_is_half_a_round_trip() -> None:
    latency_s, jitter = latency_of([0.02, 0.02, 0.03, 0.02, 0.01, 0.02, 0.02, 0.02, 0.02])
    assert latency_s == 0.01
    assert 0 < jitter < 0.5
    assert latency_of([0.02]) == (0.01, 0.0)


def test_nobody_gets_more_than_a_process_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_BYTES", 100_000)
    monkeypatch.setattr(answers, "MOST_ECHOES", 3)

    async def ask(address: str) -> tuple[int, int, int]:
        async with channel(address, Limits()) as calls:
            down = await measuring._down(calls, Effort(rate_bytes=10**9, rate_s=5))
            up = await measuring._up(calls, Effort(rate_bytes=10**9, rate_s=5))
            trips = await measuring._round_trips(calls, Effort(echoes=50))
            return down[1], up[1], len(trips)

    down, up, trips = served(ask)
    assert down == 100_000
    assert 100_000 <= up < 100_000 + len(answers.CHUNK)
    assert trips == 2  # the first one opened the connection


def test_what_does_not_answer_probes_is_told_apart() -> None:
    async def main() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            await measure(f"127.0.0.1:{port}", QUICK)
        finally:
            await server.stop(None)

    with pytest.raises(grpc.aio.AioRpcError) as found:
        asyncio.run(main())
    assert found.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    (free,) = free_addresses(1)
    monkeypatch.setattr(measuring.Effort, "answer_s", 0.2)
    call = CliRunner().invoke
    nobody = call(app, ["probe", free])
    assert (nobody.exit_code, nobody.stderr) == (
        1,
        f"edgefl: {free}: nobody serves there; edgefl doctor {free} says more\n",
    )
    for wrong in ([], ["nonsense"], ["h:1", "--serve", "h:2"], ["h:70000"]):
        refused = call(app, ["probe", *wrong])
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)


def test_the_command_prints_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    link = MeasuredLink("h:1", 0.0123, 0.25, 2.5e6, 7.5e5, None, 1, 1.0)

    async def measured(address: str, effort: Effort) -> MeasuredLink:
        assert (address, effort.rate_s) == ("h:1", 0.5)
        return link

    monkeypatch.setattr(measuring, "measure", measured)
    told = CliRunner().invoke(app, ["probe", "h:1", "--seconds", "0.5"])
    assert '{ up = "2500 kB/s", down = "750 kB/s", latency = "12.3 ms", jitter = 0.25 }' in told.stdout
    found = json.loads(CliRunner().invoke(app, ["probe", "h:1", "--seconds", "0.5", "--json"]).stdout)
    assert found["loss"] is None
    assert parse_link(found["link"]).down_bytes_per_s == 7.5e5


def test_only_what_leaves_the_machine_or_is_in_a_lab_is_probed() -> None:
    nodes = ((0,), (1,))
    assert Place("r", 1, ("127.0.0.1:1", "localhost:2"), nodes).on_loopback
    assert not Place("r", 1, ("192.168.1.1:1", "127.0.0.1:2"), nodes).on_loopback
    assert not Place("r", 1, ("10.77.0.1:1", "10.77.0.2:1"), nodes, lab=True).on_loopback


def test_the_service_is_listed_where_reflection_looks() -> None:
    assert wire.PROBE_SERVICE == "edgefl.v1.ProbeService"
