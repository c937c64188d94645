"""Strangers at a process's port, and what one of the run says that is not its to say: the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import ssl
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_lab import LIMITS, Word, pair, run, until
from process_fleet import Fleet, fleet
from small import small_plan
from test_grpc_processes import EXPERIMENT

from edgefl.messages.wire import EXCHANGE_SERVICE
from edgefl.runtimes.grpc import frames
from edgefl.runtimes.grpc.lead import LastModel
from edgefl.runtimes.grpc.place import Place
from edgefl.runtimes.grpc.runtime import GrpcRuntime


async def is_closed(address: str, said: bytes, within_s: float) -> bool:
    """Whether a connection on which so much was said is closed by the other side in this time."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(said)
        async with asyncio.timeout(within_s):
            while await reader.read(4096):
                pass
        return True
    except TimeoutError:
        return False
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.mark.parametrize("said", [b"", PREFACE[:10], PREFACE], ids=["nothing", "half", "no stream"])
def test_who_connects_and_opens_no_stream_gives_its_place_back(said: bytes) -> None:
    async def program() -> None:
        limits = replace(LIMITS, hello_timeout_s=0.5, idle_s=1.0)
        async with pair(limits=limits) as (a, b):
            assert await is_closed(b.transport._listen, said, 8.0)
            await a.deliver(0, 1, Word(1))
            assert a.transport._peers[1].arrivals == 1

    run(program)


def test_a_replayed_session_tells_nothing_anew_and_the_true_one_comes_back() -> None:
    async def program() -> None:
        async with pair() as (a, b):
            await a.deliver(0, 1, Word(1))
            await a.deliver(0, 1, Word(2))
            recorded = frames.write(a.transport._me.hello(()))
            async with grpc.aio.insecure_channel(b.transport._listen) as channel:
                call = channel.stream_stream(f"/{EXCHANGE_SERVICE}/Exchange")()
                await call.write(recorded)
                await call.read()
                again = a.transport._codec.encode(Word(1).stamped(0, 0), (1,), 0)
                await call.write(frames.write(frames.Start(0, again.header)))
                await until(lambda: a.transport._peers[1].arrivals == 2)
                call.cancel()
            await a.deliver(0, 1, Word(3))
            assert [message.number for _, message in b.messages] == [1, 2, 3]  # type: ignore[attr-defined]
            assert b.gone == [] and b.back == []

    run(program)


def test_a_refusal_does_not_hand_out_what_belonging_is_shown_by() -> None:
    async def program() -> None:
        digest = "0123456789abcdef" * 4
        async with pair(digest=digest) as (a, b):
            guess = replace(a.transport._me.hello(()), experiment_digest="guess", instance=b"stranger")
            async with grpc.aio.insecure_channel(b.transport._listen) as channel:
                call = channel.stream_stream(f"/{EXCHANGE_SERVICE}/Exchange")(iter([frames.write(guess)]))
                assert digest[:12] in await call.details() and digest[:13] not in await call.details()

    run(program)


class Records:
    """What the process that leads takes in."""

    every_s = None

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def begin(self, *_: object) -> None:
        """Not looked at, and events neither."""

    event = begin

    def merge(self, rows: Any) -> None:
        self.rows += rows["metrics"]


@pytest.fixture
def lead() -> GrpcRuntime:
    """The process that leads a run of three; it has not begun."""
    plan = small_plan("fedavg", 2)
    addresses = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    place = Place("run", 0, addresses, ((0,), (1,), (2,)))
    return GrpcRuntime(plan, Records(), None, place, digest="digest")  # type: ignore[arg-type]


NOTES = [
    ("leaving", {"nodes": [2]}),
    ("leaving", {"nodes": [0, 1]}),
    ("leaving", {"nodes": [10**9]}),
    ("leaving", {"nodes": 1}),
    ("ended", {"node": 0}),
    ("ended", {"node": "0"}),
    ("ended", {"node": True}),
    ("anew", {"node": 2, "life": 1}),
    ("anew", {"node": 1, "life": {}}),
    ("stop", []),
    ("failed", {"text": "x"}),
    ("nothing known", {}),
]


@pytest.mark.parametrize(("kind", "body"), NOTES)
def test_a_note_about_another_processs_node_changes_nothing(
    lead: GrpcRuntime, kind: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    awaited = set(lead.awaited)
    with caplog.at_level(logging.WARNING, "edgefl.grpc"):
        lead._control(1, kind, json.dumps(body).encode())
    assert not lead._gone and lead.awaited == awaited and lead.failure is None and lead.stop_reason is None
    assert kind == "nothing known" or "process 1 sent a note that makes no sense" in caplog.text


@pytest.mark.parametrize("body", [b"\xff", b"[" * 100_000, b"", b"1e999999"])
def test_a_note_that_is_no_json_is_dropped(lead: GrpcRuntime, body: bytes) -> None:
    lead._control(1, "leaving", body)
    assert not lead._gone and lead.failure is None


GOOD = {"rows": {"metrics": [[0.0, 1, "x", 1.0]]}, "traffic": [[1, 0, "Word", 1, 8, 9]],
        "busy_s": {"1": 2.5}, "stale": {"Word": 3}, "frame_bytes": 7}  # fmt: skip
WRONG = ({"busy_s": []}, {"frame_bytes": "x"}, {"stale": {"Word": []}}, {"traffic": [[1]]}, {"rows": []})
REPORTS = [[], None, 3, {}, *({**GOOD, **wrong} for wrong in WRONG)]


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_that_is_none_does_not_cost_the_others(lead: GrpcRuntime, report: Any) -> None:
    for process, note in ((1, report), (2, GOOD)):
        lead._control(process, "report", json.dumps(note).encode())
        lead._take_report(process, lead._reports[process])
    outcome = lead._outcome(1.0)
    assert outcome.busy_s[1] == 2.5 and outcome.stale["Word"] >= 3 and outcome.frame_bytes >= 7
    assert lead.observer.rows == GOOD["rows"]["metrics"]  # type: ignore[attr-defined, index]


def test_the_last_model_of_another_node_is_not_taken(lead: GrpcRuntime) -> None:
    vector = lead.plan.learner.model.init()  # type: ignore[union-attr]
    for node in (2, 1):
        lead.arrived(0, LastModel(node, 1.0, 3, vector).stamped(1, 0))
    assert set(lead._models) == {1}


def connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def annoy(nodes: Fleet) -> list[socket.socket]:
    """Everything that a port of the internet hears in a night; returns the connections that are held open."""
    held = []
    for k in range(300):
        address = nodes.addresses[k % len(nodes.addresses)]
        with connection(address) as one:
            one.sendall((b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 9, b"\x00" * 5000)[k % 3])
        if k % 30 == 0:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with pytest.raises(OSError), connection(address) as one:
                context.wrap_socket(one)
    for k in range(1000):
        one = connection(nodes.addresses[k % len(nodes.addresses)])
        one.sendall(PREFACE[: k % len(PREFACE)])
        held.append(one)
    return held


@pytest.mark.slow
def test_a_night_on_the_internet(tmp_path: Path) -> None:
    """Three processes of 256 file descriptors each end as if nobody had come; memory stays bounded."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held: list[socket.socket] = []
    try:
        with fleet(tmp_path, EXPERIMENT.format(clients=2, rounds=500), 3) as nodes:
            nodes.until("connected to process 2", 0)
            for process in nodes.processes.values():
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (256, 256))  # type: ignore[attr-defined]
            before = [resident_mb(process.pid) for process in nodes.processes.values()]
            held = annoy(nodes)
            time.sleep(1.0)
            after = [resident_mb(process.pid) for process in nodes.processes.values()]
            assert nodes.ends() == {0: 0, 1: 0, 2: 0}
            assert (nodes.summary["status"], nodes.events()) == ("finished", [])
            assert max(y - x for x, y in zip(before, after, strict=True)) < 64
    finally:
        for one in held:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_for_others_can_be_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    """They may never come, and are waited for for minutes."""
    with fleet(tmp_path, EXPERIMENT.format(clients=2, rounds=5), 3, only=(0,)) as nodes:
        nodes.until("waiting for process 1", 0)
        nodes.processes[0].send_signal(number)
        nodes.processes[0].communicate(timeout=60)
        assert nodes.processes[0].returncode == 130
        assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
