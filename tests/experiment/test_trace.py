"""The trace: valid JSON, spans where and when they were, no overlap on a thread."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_up_run import make_run, write_table

from edgefl.errors import ConfigError
from edgefl.experiment.trace import Lanes, pid, write_trace


def events(folder: Path) -> list[dict[str, Any]]:
    path = write_trace(folder)
    assert path == folder / "trace.json"
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return events(make_run(tmp_path_factory.mktemp("runs") / "run", clients=5, rounds=6))


def test_processes_are_nodes_and_threads_kinds(trace: list[dict[str, Any]]) -> None:
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names[pid(0)] == "server 0 (laptop)" and names[pid(3)] == "client 3 (raspberry-pi-4b)"
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert {name for (p, _), name in threads.items() if p == pid(3)} == {"compute", "send"}
    # The server sends to five clients at a time.
    assert {name for (p, _), name in threads.items() if p == pid(0)} == {
        "send",
        *(f"send {i}" for i in range(2, 6)),
    }
    assert {(e["pid"], e["tid"]) for e in trace if e["ph"] == "X"} == set(threads)


def test_spans_keep_their_times_in_microseconds(trace: list[dict[str, Any]]) -> None:
    work = [e for e in trace if e["ph"] == "X" and e["pid"] == pid(3) and e["cat"] == "compute"]
    assert [(e["ts"], e["dur"], e["name"]) for e in work] == [
        (5e6 * r + 1e6, 2e6, "LocalSGD") for r in range(6)
    ]
    # 5 downloads in each of 6 rounds; work and upload of 5 clients, one of them away in one round.
    assert sum(e["ph"] == "X" for e in trace) == 6 * 5 + 2 * (6 * 5 - 1)


def test_spans_of_a_thread_do_not_overlap(trace: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for e in trace:
        if e["ph"] == "X":
            threads[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_events_are_instants_and_the_curve_a_counter(trace: list[dict[str, Any]]) -> None:
    instants = [(e["name"], e["pid"], e["ts"]) for e in trace if e["ph"] == "i"]
    assert instants == [("crash", pid(1), 15e6), ("back", pid(1), 20e6)]
    counters = [e for e in trace if e["ph"] == "C"]
    assert len(counters) == 7 and counters[0]["args"]["accuracy"] == pytest.approx(0.1, abs=0.02)


def test_lanes_take_no_more_threads_than_overlap() -> None:
    lanes = Lanes()
    placed = [lanes.place(*span)[0] for span in ((0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (3.5, 5.0), (0.5, 6.0))]
    assert placed == [0, 1, 0, 1, 2]


def test_odd_names_and_bad_rows_do_no_harm(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", clients=1, rounds=1)
    odd = 'say "hi"\\ \n é'
    write_table(
        folder, "spans", [(1, odd, 0.0, 1.0, odd), (1, "compute", "x", 1.0, ""), (1, "send", 2.0, 1.0, "")]
    )
    write_table(folder, "events", [(0.5, odd, "", odd)])
    found = events(folder)
    assert [(e["name"], e["cat"]) for e in found if e["ph"] == "X"] == [(odd, odd)]
    assert [(e["name"], e["s"], e["args"]) for e in found if e["ph"] == "i"] == [(odd, "g", {"detail": odd})]


def test_missing_files_leave_an_empty_trace(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema": 1, "summary": {}}')
    assert [e["ph"] for e in events(tmp_path)] == ["M", "M"]
    with pytest.raises(ConfigError):
        write_trace(tmp_path / "nowhere")
