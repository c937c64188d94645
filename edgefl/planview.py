"""Plans and profiles in a terminal."""

from __future__ import annotations

import time
from collections import defaultdict
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from edgefl.console import LINE_EVERY_S, table
from edgefl.experiment.preview import NodePreview, Preview
from edgefl.experiment.report.units import number, scaled, seconds, share

MOST_ROWS = 32
WIDTH = 60
_MARKS = {"compute": "#", "send": "="}


def plan_table(found: Preview) -> Table:
    """A row per node, or per kind of node in a large fleet."""
    groups: dict[tuple[object, ...], list[NodePreview]] = defaultdict(list)
    large = len(found.nodes) > MOST_ROWS
    for one in found.nodes:
        key = (one.role, one.device, one.batch_size, one.steps, one.width)
        groups[key if large else (one.node,)].append(one)
    widths = any(one.width is not None for one in found.nodes)
    rows = [_row(members, widths) for members in groups.values()]
    title = (
        f"{found.method}, {found.policy}: {seconds(found.round_s)} a round over {number(found.num_rounds)}"
        f" rounds, {seconds(found.time_s)} in all, devices {share(found.idle, 1.0)} idle"
    )
    headers = (
        "node", "role", "device", "examples", "batch", "steps", *(("width",) if widths else ()),
        "round alone", "computing", "idle", "memory", "sent", "energy (modelled)",
    )  # fmt: skip
    made = table(headers, rows, right=range(3, len(headers)))
    made.title, made.title_justify = title, "left"
    return made


def _row(members: list[NodePreview], widths: bool) -> tuple[str, ...]:
    first, count = members[0], len(members)
    planned = [one.planned_s for one in members if one.planned_s is not None]
    joules = [one.joules for one in members if one.joules is not None]
    has_data = first.num_examples > 0
    return (
        str(first.node) if count == 1 else f"{first.node}, ... ({count})",
        first.role,
        first.device,
        number(sum(one.num_examples for one in members) / count),
        str(first.batch_size) if has_data else "",
        str(first.steps) if has_data else "",
        *((share(first.width, 1.0) if first.width is not None and has_data else "",) if widths else ()),
        seconds(sum(planned) / len(planned)) if planned else "",
        seconds(sum(one.busy_s for one in members) / count),
        share(sum(one.idle for one in members), count),
        scaled(max(one.memory_bytes for one in members), "B") if has_data else "",
        scaled(sum(one.sent_bytes for one in members), "B"),
        scaled(sum(joules), "J") if joules else "",
    )


def timeline(found: Preview) -> list[str]:
    """The first rounds as lines of text: # computes, = sends, . neither."""
    end_s = found.shown_s
    what = "two rounds" if end_s == 2 * found.round_s else "a round of the slowest"
    lines = [f"0 to {seconds(end_s)}, {what}: # computes, = sends, . neither"]
    by_node: dict[int, list[str]] = {one.node: ["."] * WIDTH for one in found.nodes[:MOST_ROWS]}
    for kind in ("send", "compute"):  # what is computed lies over what is sent
        for node, what, start_s, stop_s in found.spans:
            if what != kind or node not in by_node:
                continue
            first = int(start_s / end_s * WIDTH)
            last = max(first + 1, round(stop_s / end_s * WIDTH))
            by_node[node][first:last] = _MARKS[kind] * (min(last, WIDTH) - first)
    lines += [f"{found.nodes[i].role:>10} {i:<4} {''.join(marks)[:WIDTH]}" for i, marks in by_node.items()]
    if len(found.nodes) > MOST_ROWS:
        lines.append(f"and {len(found.nodes) - MOST_ROWS} more")
    return lines


class ProfileBar:
    """How far a profile is. console: None shows nothing."""

    def __init__(self, console: Console | None) -> None:
        self._console, self._task = console, TaskID(0)
        self._bar: Progress | None = None
        self._said = time.monotonic()

    def __enter__(self) -> ProfileBar:
        if self._console is not None and self._console.is_terminal:
            columns = (TextColumn("{task.description:<44}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("profile", total=1.0)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def told(self, what: str, done: float) -> None:
        """What is being measured, and the share that is done."""
        if self._bar is not None:
            self._bar.update(self._task, description=what[:44], completed=done)
        elif self._console is not None and time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            self._console.print(f"profile: {done:.0%}, {what}", markup=False, highlight=False)
