"""Reading a run folder's files; all but run.json may be empty or missing."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl.errors import ConfigError
from edgefl.experiment.folder import told

Floats = NDArray[np.float64]
# The metrics that a report shows; the others stay in the file.
METRICS = ("staleness", "reports", "missing", "dropped", "late", "lost", "refused", "train_loss", "round")


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation of the run: seconds, the metric, its spread over nodes, bytes and joules so far."""

    time_s: float
    value: float
    loss: float | None
    worst_tenth: float | None
    best: float | None
    payload_bytes: float | None
    joules: float | None


@dataclass(frozen=True)
class NodeRow:
    """One node at the end of the run; None where the run does not know a figure."""

    id: int
    role: str
    device: str
    num_examples: float | None
    busy_s: float
    idle_s: float
    sent_bytes: float
    received_bytes: float
    joules: float | None
    metric: float | None
    loss: float | None
    energy: str = "modelled"

    @property
    def name(self) -> str:
        return f"{self.role} {self.id} ({self.device})" if self.device else f"{self.role} {self.id}"


@dataclass(frozen=True)
class Spans:
    """What nodes spent their time on, as columns of equal length; kind and detail index into names."""

    node: NDArray[np.int64]
    kind: NDArray[np.int64]
    start_s: Floats
    end_s: Floats
    detail: NDArray[np.int64]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.node)

    def where(self, chosen: NDArray[Any]) -> Spans:
        """The spans that a mask or an array of places chooses."""
        return Spans(
            self.node[chosen],
            self.kind[chosen],
            self.start_s[chosen],
            self.end_s[chosen],
            self.detail[chosen],
            self.names,
        )

    def of_kind(self, kind: str) -> Spans:
        code = self.names.index(kind) if kind in self.names else -1
        return self.where(self.kind == code)

    @cached_property
    def by_node(self) -> dict[int, Spans]:
        """The spans of each node, in the order of the file."""
        order = np.argsort(self.node, kind="stable")
        ids, starts = np.unique(self.node[order], return_index=True)
        parts = np.split(order, starts[1:])  # of no spans: one part, and no id
        return {int(i): self.where(part) for i, part in zip(ids, parts, strict=False)}


@dataclass(frozen=True)
class Series:
    """One recorded metric: time in seconds, node and value, in the order of recording."""

    time_s: Floats
    node: NDArray[np.int64]
    value: Floats


@dataclass(frozen=True)
class Event:
    """Something worth a line: a crash, a return, a message that was dropped."""

    time_s: float
    kind: str
    node: int | None
    detail: str


class RunFiles:
    """A run folder. Raises ConfigError where `folder` holds no readable run.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                "run folder", str(folder), f"a folder with a readable run.json ({error})"
            ) from error
        if not isinstance(info, dict):
            raise ConfigError("run folder", str(folder), "a folder whose run.json holds a table")
        self.info = told(folder, info)
        self.summary: dict[str, Any] = _table(info.get("summary"))

    @cached_property
    def experiment_text(self) -> str:
        path = self.folder / "experiment.toml"
        try:
            return path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "run folder", str(path), f"a file of text that can be read ({error})"
            ) from error

    @cached_property
    def experiment(self) -> dict[str, Any]:
        """The resolved experiment file; empty where it is missing or cannot be read."""
        try:
            return tomllib.loads(self.experiment_text)
        except tomllib.TOMLDecodeError:
            return {}

    @cached_property
    def curve(self) -> list[CurvePoint]:
        names = ("loss", "worst_tenth", "best", "payload_bytes", "joules")
        points = []
        for row in rows(self.folder / "curve.csv"):
            time_s, value = figure(row, "time_s"), figure(row, "value")
            if time_s is not None and value is not None:
                points.append(CurvePoint(time_s, value, *(figure(row, name) for name in names)))
        return points

    @cached_property
    def nodes(self) -> list[NodeRow]:
        nodes = []
        for row in rows(self.folder / "nodes.csv"):
            nodes.append(
                NodeRow(
                    id=_id(row) or 0,
                    role=row.get("role") or "node",
                    device=row.get("device") or "",
                    num_examples=figure(row, "num_examples"),
                    busy_s=figure(row, "busy_s") or 0.0,
                    idle_s=figure(row, "idle_s") or 0.0,
                    sent_bytes=figure(row, "sent_bytes") or 0.0,
                    received_bytes=figure(row, "received_bytes") or 0.0,
                    joules=figure(row, "joules"),
                    metric=figure(row, "metric"),
                    loss=figure(row, "loss"),
                    energy=row.get("energy") or "modelled",
                )
            )
        return nodes

    @cached_property
    def names(self) -> Mapping[int, str]:
        """How each node is called; "node 3" where nodes.csv does not list it."""
        return _Names({node.id: node.name for node in self.nodes})

    @cached_property
    def metrics(self) -> dict[str, Series]:
        """METRICS, as far as they were recorded."""
        columns = {name: (array("d"), array("d"), array("d")) for name in METRICS}
        for row in rows(self.folder / "metrics.csv"):
            time_s, value = figure(row, "time_s"), figure(row, "value")
            if row.get("name") in columns and time_s is not None and value is not None:
                column = columns[row["name"]]
                column[0].append(time_s)
                column[1].append(figure(row, "node") or 0.0)
                column[2].append(value)
        return {
            name: Series(np.array(t), np.array(n).astype(np.int64), np.array(v))
            for name, (t, n, v) in columns.items()
            if len(t)
        }

    @cached_property
    def spans(self) -> Spans:
        codes: dict[str, int] = {}
        node, kind, detail = array("q"), array("q"), array("q")
        start, end = array("d"), array("d")
        for row in rows(self.folder / "spans.csv"):
            i, start_s, end_s = _id(row), figure(row, "start_s"), figure(row, "end_s")
            if i is None or start_s is None or end_s is None or end_s < start_s:
                continue
            node.append(i)
            start.append(start_s)
            end.append(end_s)
            kind.append(codes.setdefault(row.get("kind") or "", len(codes)))
            detail.append(codes.setdefault(row.get("detail") or "", len(codes)))
        whole = [np.array(column, dtype=np.int64) for column in (node, kind, detail)]
        return Spans(whole[0], whole[1], np.array(start), np.array(end), whole[2], tuple(codes))

    @cached_property
    def traffic(self) -> dict[tuple[int, int, str], list[float]]:
        """Messages, payload bytes and encoded bytes by (sender, receiver, kind)."""
        table: defaultdict[tuple[int, int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for row in rows(self.folder / "traffic.csv"):
            ends = _id(row, "sender"), _id(row, "receiver")
            if ends[0] is not None and ends[1] is not None:
                counts = table[ends[0], ends[1], row.get("kind") or "?"]
                for i, name in enumerate(("messages", "payload_bytes", "encoded_bytes")):
                    counts[i] += figure(row, name) or 0.0
        return dict(table)

    @cached_property
    def events(self) -> list[Event]:
        return [
            Event(figure(row, "time_s") or 0.0, row.get("kind") or "?", _id(row), row.get("detail") or "")
            for row in rows(self.folder / "events.csv")
        ]

    @cached_property
    def partition(self) -> dict[int, dict[str, float]]:
        """Examples by class name, by node."""
        table: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for row in rows(self.folder / "partition.csv"):
            node, count = _id(row), figure(row, "count")
            if node is not None and count:
                table[node][row.get("class") or "?"] = count
        return dict(table)

    @property
    def time_s(self) -> float:
        """How long the run took on its own clock, in seconds."""
        ends = [self.curve[-1].time_s] if self.curve else []
        ends += [float(self.spans.end_s.max())] if len(self.spans) else []
        return as_float(self.summary.get("time_s")) or max(ends, default=0.0)


class _Names(dict[int, str]):
    def __missing__(self, node: int) -> str:
        return f"node {node}" if node >= 0 else "the run"


def rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a CSV file by column name; none where the file is missing.

    Raises ConfigError for a file that is none.
    """
    if not path.exists():
        return
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("run folder", str(path), f"a CSV file that can be read ({error})") from error


def figure(row: Mapping[str, str], name: str) -> float | None:
    """A finite number from a row, or None where there is none."""
    return as_float(row.get(name))


def as_float(value: object) -> float | None:
    """A finite number, or None."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def _id(row: Mapping[str, str], name: str = "node") -> int | None:
    found = figure(row, name)
    return int(found) if found is not None and abs(found) < 2**53 else None


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
