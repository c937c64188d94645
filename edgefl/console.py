"""What a person sees in a terminal: runs as they go on, and tables at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from edgefl.experiment.report.units import NONE, error, number, scaled, seconds
from edgefl.experiment.state import State

if TYPE_CHECKING:
    from edgefl.experiment.check import Laboratory, Report, Trial

LINE_EVERY_S = 5.0
"""Without a terminal: seconds between two lines about the same run."""
MOST_ROWS = 16
"""More runs than that, and only those that are running have a row."""


@dataclass
class Row:
    """One run on the display."""

    state: State = field(default_factory=State)
    phase: str = "waiting"
    note: str = ""
    began: float = 0.0
    said: float = 0.0

    def wall_s(self) -> float:
        """Seconds since it started here, as a clock shows them while it runs."""
        return time.monotonic() - self.began if self.phase == "running" else self.state.wall_s


class Display:
    """Runs side by side: rows that move in a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, Row] = {}
        self._live: Live | None = None

    def open(self, labels: Sequence[str]) -> None:
        """Start to show these runs."""
        self._rows = {label: Row() for label in labels}
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=8, transient=True
            )
            self._live.start()

    def start(self, label: str) -> None:
        """A run starts."""
        row = self._rows[label]
        row.phase, row.began = "running", time.monotonic()
        self._line(label, "starts")

    def update(self, label: str, state: State) -> None:
        """A run goes on."""
        row = self._rows[label]
        row.state = state
        now = time.monotonic()
        if now - max(row.said, row.began) >= LINE_EVERY_S:
            row.said = now
            self._line(label, f"{seconds(state.time_s)}, step {state.step}, {_value(state)}, {_wall(row)}")

    def finish(self, label: str, phase: str, note: str, state: State | None = None) -> None:
        """A run is over. note: what is worth saying of it; state: where it ended, where known."""
        row = self._rows[label]
        wall_s = row.wall_s()
        row.phase, row.note = phase, note
        row.state = replace(state or row.state, wall_s=wall_s)
        self._line(label, f"{phase}: {note}" if note else phase)

    def close(self) -> None:
        """Take the rows away; what stays is printed afterwards."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, label: str, text: str) -> None:
        if self._live is None:
            self._console.print(f"{label}: {text}", markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        phases = [row.phase for row in self._rows.values()]
        many = len(phases) > MOST_ROWS
        table = Table.grid(padding=(0, 2))
        table.add_column()  # where room is short, labels give way to figures
        for _ in range(5):
            table.add_column(no_wrap=True)
        for label, row in self._rows.items():
            if not many or row.phase == "running":
                table.add_row(*_cells(label, row))
        if not many:
            return table
        done = len(phases) - phases.count("waiting") - phases.count("running")
        return Group(table, Text(f"{done} of {len(phases)} runs are over, {phases.count('failed')} failed"))


def _cells(label: str, row: Row) -> tuple[RenderableType, ...]:
    state = row.state
    style = {"failed": "red", "waiting": "dim"}.get(row.phase, "bold")
    name, wall = Text(label, style=style, no_wrap=True, overflow="ellipsis"), Text(_wall(row), style="dim")
    if row.phase == "waiting":
        return name, Text(row.phase, style=style)
    if row.phase == "failed":
        return name, Text(row.phase, style=style), "", "", Text(row.note, style=style), wall
    progress: RenderableType = Text(row.phase)
    if row.phase == "running":
        progress = ProgressBar(total=1.0, completed=state.share or 0.0, pulse=state.share is None, width=16)
    return (
        name,
        progress,
        seconds(state.time_s),
        f"step {state.step}" if state.step else "",
        _value(state),
        wall,
    )


def _value(state: State) -> str:
    if state.value is None:
        return f"no {state.metric or 'value'} yet"
    target = "" if state.target is None else f", target {number(state.target)}"
    return f"{state.metric} {number(state.value)}{target}"


def _wall(row: Row) -> str:
    return f"{row.wall_s():.0f} s here"


class RunView:
    """Shows one run; a `Progress`."""

    def __init__(self, console: Console) -> None:
        self._display = Display(console)
        self._label, self._state = "", State()

    def begin(
        self, description: str, *, time_s: float | None, rounds: int | None, metric: str, target: float | None
    ) -> None:
        """Open the display."""
        self._label, self._state = description, State(metric, target, time_s, rounds)
        self._display.open([description])
        self._display.start(description)

    def update(
        self, time_s: float, step: int, value: float | None, target: float | None, wall_s: float
    ) -> None:
        """Show where the run is."""
        self._state = replace(self._state, time_s=time_s, step=step, value=value, wall_s=wall_s)
        self._display.update(self._label, self._state)

    def end(self, status: str) -> None:
        """Close the display."""
        self._display.finish(self._label, status, "")
        self._display.close()


class BatchView:
    """Shows the runs of a comparison or a sweep; a `BatchProgress`."""

    def __init__(self, console: Console) -> None:
        self._display = Display(console)

    def begin(self, labels: Sequence[str]) -> None:
        """Open the display."""
        self._display.open(labels)

    def started(self, label: str) -> None:
        """A run has started."""
        self._display.start(label)

    def update(self, label: str, state: State) -> None:
        """Show where a run is."""
        self._display.update(label, state)

    def ended(self, label: str, summary: Mapping[str, Any] | None, reason: str | None, reused: bool) -> None:
        """Show how a run ended."""
        if summary is None:
            self._display.finish(label, "failed", reason or "")
            return
        target = (summary.get("target") or {}).get("value")
        state = State(summary["metric"], target, time_s=summary["time_s"], value=summary["final_metric"])
        phase = "kept" if reused else str(summary["status"])
        self._display.finish(label, phase, f"{seconds(state.time_s)}, {_value(state)}", state)

    def end(self) -> None:
        """Close the display."""
        self._display.close()


class CheckView:
    """How many schedules a method has been through."""

    def __init__(self, console: Console) -> None:
        self._console, self._task = console, TaskID(0)
        self._said, self._done, self._total, self._label = time.monotonic(), 0, 0, ""
        self._bar: Progress | None = None

    def begin(self, method: str, total: int) -> None:
        """Open the bar; without a terminal, a line now and then."""
        self._label, self._total = method, total
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task(f"check {method}", total=total)
            self._bar.start()

    def checked(self, trial: Trial) -> None:
        """One more schedule is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)
        self._line(f"{self._done} of {self._total} schedules")

    def shrinking(self) -> None:
        """A run is made to explain a failure."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"check {self._label}: what is needed for it")
        self._line("looking for the shortest schedule that fails")

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def _line(self, text: str) -> None:
        if self._bar is None and time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            self._console.print(f"{self._label}: {text}", markup=False, highlight=False, soft_wrap=True)


def check_lines(laboratory: Laboratory, report: Report) -> list[str]:
    """What a check has found, as lines of text."""
    kinds = ", ".join(report.tolerated) or "none"
    if report.finding is None:
        counts = Counter(trial.verdict.kind for trial in report.trials)
        ends = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        return [f"{report.method}: {len(report.trials)} schedules of faults ({kinds}): {ends}"]
    trial, shortest = report.finding.trial, report.finding.shortest
    faults = shortest.schedule.describe(laboratory.plan) or ["no fault at all"]
    return [
        f"{report.method}: seed {trial.schedule.seed} {shortest.verdict.kind}: {shortest.verdict.detail}",
        "the shortest schedule found that ends so:",
        *(f"  {fault}" for fault in faults),
        f"again: {report.finding.replay}",
    ]


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> Table:
    """A table of plain text; `right`: columns of figures, which stand to the right."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for i, header in enumerate(headers):
        made.add_column(Text(header), justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    return made


def run_table(summary: Mapping[str, Any]) -> Table:
    """The key figures of one run."""
    spread, target = summary.get("spread") or {}, summary.get("target")
    reason = f": {summary['reason']}" if summary.get("reason") else ""
    rows = [("status", f"{summary['status']}{reason}")]
    if target:
        rows.append((f"time to {_target(target)}", _missed(summary.get("time_to_target_s"))))
    rows += [
        ("time at the end", seconds(summary["time_s"])),
        *_rounds(summary),
        (f"final {summary['metric']}", number(summary.get("final_metric"))),
        ("final loss", number(summary.get("final_loss"))),
        (
            "worst tenth, mean, best",
            ", ".join(number(spread.get(k)) for k in ("worst_tenth", "mean", "best")),
        ),
        ("messages", f"{summary['messages']:,}"),
        ("payload, on the wire", f"{_bytes(summary, 'payload_bytes')}, {_bytes(summary, 'wire_bytes')}"),
        ("devices busy, idle", f"{seconds(summary['busy_s'])}, {seconds(summary['idle_s'])}"),
        (f"energy ({summary.get('energy') or 'not known'})", scaled(summary.get("joules"), "J")),
        ("took here", seconds(summary["wall_s"])),
        *_prediction(summary.get("predicted")),
    ]
    title = f"{summary['method']}, {summary['nodes']} nodes, {summary['runtime']}, seed {summary['seed']}"
    made = table((title, ""), rows)
    made.columns[0].style = "dim"
    return made


def _rounds(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """How many, and how long; beside a prediction the time stands there."""
    if summary.get("round_s") is not None:
        each = "" if summary.get("predicted") else f", {seconds(summary['round_s'])} each"
        yield "rounds", f"{number(summary['rounds'])}{each}"


def _prediction(found: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """What virtual time says of a run on the wall clock, beside what was measured."""
    if found is None or "failed" in found:
        return
    measured, foreseen = found["round_s"]["measured"], found["round_s"]["predicted"]
    if found["same_devices"]:
        yield (
            "a round: measured, predicted",
            f"{seconds(measured)}, {seconds(foreseen)} ({error(measured, foreseen)})",
        )
    else:
        yield (
            "a round, on this machine",
            f"{seconds(measured)}: not slowed to the file's devices (execution.emulate)",
        )
        yield "a round, on the file's devices", f"{seconds(foreseen)} in virtual time"
    measured, foreseen = found["sent_bytes"]["measured"], found["sent_bytes"]["predicted"]
    shown = f"{scaled(measured, 'B')}, {scaled(foreseen, 'B')} ({error(measured, foreseen)})"
    yield "sent in a round: measured, predicted", shown


def comparison_table(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], word: str) -> Table:
    """One row per variant, means over seeds with 95 % intervals. summary: of one run; word: what varies."""
    metric, target = summary.get("metric", "metric"), summary.get("target")
    headers = [word, *([f"time to {_target(target)}"] if target else []), f"final {metric}"]
    headers += ["worst tenth", "payload", "busy", "idle", "energy", "rank"]
    cells = [_comparison_row(row, target is not None) for row in rows]
    return table(headers, cells, right=range(1, len(headers)))


def _comparison_row(row: Mapping[str, Any], has_target: bool) -> list[str]:
    completed = row["runs"] - row["failed"]
    if not completed:
        return [str(row["variant"]), "failed", *[NONE] * (5 + has_target), number(row["rank"], 2)]
    return [
        str(row["variant"]),
        *([_reached(row)] if has_target else []),
        _with_interval(row, "final_metric", number),
        number(row["worst_tenth"]),
        scaled(row["payload_bytes"], "B"),
        seconds(row["busy_s"]),
        seconds(row["idle_s"]),
        scaled(row["joules"], "J"),
        number(row["rank"], 2),
    ]


def _reached(row: Mapping[str, Any]) -> str:
    """When a variant's runs met the target, and how many where some did not."""
    if not row["reached"]:
        return "missed"
    some = "" if row["reached"] == row["runs"] else f" ({row['reached']} of {row['runs']})"
    return _with_interval(row, "time_to_target_s", seconds) + some


def _with_interval(row: Mapping[str, Any], key: str, show: Callable[[float | None], str]) -> str:
    half = row[f"{key}_ci95"]
    return show(row[key]) + ("" if half is None else f" ± {show(half)}")


def _target(target: Mapping[str, Any]) -> str:
    return f"{target['metric']} {number(target['value'])}"


def _missed(time_s: float | None) -> str:
    return "missed" if time_s is None else seconds(time_s)


def _bytes(summary: Mapping[str, Any], key: str) -> str:
    return scaled(summary.get(key), "B")


def link_table(classes: Iterable[Mapping[str, Any]]) -> Table:
    """The figures of link classes."""
    headers = ("link", "up", "down", "latency, one way", "jitter", "loss", "source")
    rows = [
        (
            c["name"],
            scaled(c["up_bytes_per_s"], "B/s"),
            scaled(c["down_bytes_per_s"], "B/s"),
            seconds(c["latency_s"]),
            number(c["jitter"]),
            number(c["loss"], 4),
            c["source"],
        )
        for c in classes
    ]
    return table(headers, rows, right=range(1, 6))


def source_table(sources: Iterable[Mapping[str, Any]]) -> Table:
    """Where the figures of one entry of a catalog come from."""
    rows = [
        (", ".join(s["figures"]), s["says"], NONE if s["url"] is None else _checked(s), s["url"] or NONE)
        for s in sources
    ]
    return table(("figures", "what is said of them", "read there", "where"), rows)


def _checked(source: Mapping[str, Any]) -> str:
    return "yes" if source["verified"] else "not verified"


def device_table(profiles: Iterable[Mapping[str, Any]]) -> Table:
    """The figures of device profiles."""
    headers = ("device", "compute", "memory", "memory rate", "idle", "busy", "called")
    rows = [
        (
            p["name"],
            scaled(p["compute_flops"], "FLOP/s"),
            scaled(p["memory_bytes"], "B"),
            scaled(p["memory_bytes_per_s"], "B/s"),
            scaled(p["idle_w"], "W"),
            scaled(p["busy_w"], "W"),
            p["title"],
        )
        for p in profiles
    ]
    return table(headers, rows, right=range(1, 6))
