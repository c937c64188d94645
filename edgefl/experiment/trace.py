"""The timeline of a run for trace viewers: ui.perfetto.dev, chrome://tracing."""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator
from pathlib import Path

from edgefl.experiment.report.curves import metric_name
from edgefl.experiment.report.read import RunFiles, figure, rows
from edgefl.whole import replacing

RUN_PID = 1_000_000_000
"""Process of what belongs to no node; ids of nodes lie below."""


def write_trace(folder: Path) -> Path:
    """Write folder/trace.json in the Chrome trace event format and return its path.

    One process per node, called as in reports; threads per kind of span, with further ones ("send 2") where
    spans of a kind overlap; events as instants; the learning curve as a counter. Times in microseconds.
    Rows are streamed: memory grows with nodes and overlaps, not with spans.
    Raises ConfigError where `folder` is no run folder.
    Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    run = RunFiles(Path(folder))
    path = run.folder / "trace.json"
    with replacing(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(_process(RUN_PID, f"the run ({run.summary.get('method') or 'edgefl'})", -1).encode())
        for source in (_processes(run), _span_records(run), _event_records(run), _curve_records(run)):
            for record in source:
                file.write(b",\n" + record.encode())
        file.write(b"\n]}\n")
    return path


def pid(node: int) -> int:
    """A node's process number: viewers treat process 0 as the idle one."""
    return node + 1 if node >= 0 else RUN_PID


def _processes(run: RunFiles) -> Iterator[str]:
    for node in run.nodes:
        yield _process(pid(node.id), node.name, node.id)


def _process(number: int, name: str, place: int) -> str:
    named = {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
    sorted_ = {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": place}}
    return f"{json.dumps(named)},\n{json.dumps(sorted_)}"


class Lanes:
    """Threads of one kind of span on one node: spans of a lane do not overlap, as viewers require.

    Greedy: a span takes the lane that became free last before it starts, or a new one.
    """

    def __init__(self) -> None:
        self._free: list[tuple[float, int]] = []

    def place(self, start_s: float, end_s: float) -> tuple[int, bool]:
        """(lane, whether it is a new one) of a span."""
        i = bisect.bisect_right(self._free, (start_s, 1 << 62)) - 1
        lane, new = (self._free.pop(i)[1], False) if i >= 0 else (len(self._free), True)
        bisect.insort(self._free, (end_s, lane))
        return lane, new


# Thread numbers leave room for a million lanes of each kind, in the order in which viewers list them.
_FIRST_THREAD = {"compute": 1, "send": 1_000_001, "wait": 2_000_001}


def _span_records(run: RunFiles) -> Iterator[str]:
    lanes: dict[tuple[int, str], Lanes] = {}
    words: dict[str, str] = {}
    for row in rows(run.folder / "spans.csv"):
        node, start_s, end_s = figure(row, "node"), figure(row, "start_s"), figure(row, "end_s")
        if node is None or start_s is None or end_s is None or end_s < start_s:
            continue
        kind, number = row.get("kind") or "span", pid(int(node))
        lane, new = lanes.setdefault((number, kind), Lanes()).place(start_s, end_s)
        thread = _FIRST_THREAD.get(kind, 3_000_001) + lane
        if new:
            name = kind if lane == 0 else f"{kind} {lane + 1}"
            yield json.dumps(
                {"ph": "M", "pid": number, "tid": thread, "name": "thread_name", "args": {"name": name}}
            )
        detail = row.get("detail") or kind
        label = words.setdefault(detail, json.dumps(detail))
        category = words.setdefault(kind, json.dumps(kind))
        start = _microseconds(start_s)
        length = round(_microseconds(end_s) - start, 3)  # of rounded ends: neighbours meet and never overlap
        yield (
            f'{{"ph":"X","pid":{number},"tid":{thread},"ts":{start},"dur":{length},"name":{label},"cat":{category}}}'
        )


def _event_records(run: RunFiles) -> Iterator[str]:
    for row in rows(run.folder / "events.csv"):
        time_s, node = figure(row, "time_s"), figure(row, "node")
        if time_s is None:
            continue
        number = RUN_PID if node is None else pid(int(node))
        scope = "g" if number == RUN_PID else "p"
        record = {"ph": "i", "s": scope, "pid": number, "tid": 0, "ts": _microseconds(time_s)}
        record |= {"name": row.get("kind") or "event", "cat": "event"}
        if row.get("detail"):
            record["args"] = {"detail": row["detail"]}
        yield json.dumps(record)


def _curve_records(run: RunFiles) -> Iterator[str]:
    name = metric_name(run)
    for point in run.curve:
        record = {"ph": "C", "pid": RUN_PID, "ts": _microseconds(point.time_s), "name": name}
        yield json.dumps({**record, "args": {name: point.value}})


def _microseconds(time_s: float) -> float:
    return round(time_s * 1e6, 3)
