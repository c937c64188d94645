"""Who did what when: the whole run as a heat map, and a window of it span by span."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgefl.experiment.report.curves import thinned
from edgefl.experiment.report.html import Markup, figure, join, legend, paragraph
from edgefl.experiment.report.intervals import union
from edgefl.experiment.report.read import Floats, RunFiles, Spans
from edgefl.experiment.report.svg import COMPUTE, PALETTE, SEND, Chart, row_chart
from edgefl.experiment.report.units import number, seconds, time_scale

MOST_ROWS, MOST_SPANS, SLICES = 40, 1600, 120
_LEVELS = 12
LOST = PALETTE[3]


def timeline(run: RunFiles) -> Markup:
    """The run's heat map and a window of its spans."""
    if not len(run.spans) or run.time_s <= 0:
        return Markup("")
    rows = thinned(sorted(run.spans.by_node), MOST_ROWS)
    few = "" if len(rows) == len(run.spans.by_node) else (
        f" {len(rows)} of {len(run.spans.by_node)} nodes are shown, evenly spaced by id."
    )  # fmt: skip
    whole = paragraph(
        f"trace.json holds every span: open it in ui.perfetto.dev or chrome://tracing.{few}", "note"
    )
    return join((_heat_map(run, rows), _window(run, rows), whole))


def _heat_map(run: RunFiles, rows: Sequence[int]) -> Markup:
    chart = row_chart(
        "Share of each slice of time that a node computed", [run.names[i] for i in rows], (0.0, run.time_s),
        x_title="time", x_scale=time_scale(run.time_s), row=16,
    )  # fmt: skip
    edges = np.linspace(0.0, run.time_s, SLICES + 1)
    for row, node in enumerate(rows):
        compute = run.spans.by_node[node].of_kind("compute")
        busy = busy_shares(compute, edges)
        words = f"{run.names[node]}: computing {number(100 * float(busy.mean()))} % of the run"
        chart.box((0.0, run.time_s), (-row - 0.92, -row - 0.08), "#8883", words)
        _draw_levels(chart, busy, edges, row)
    _mark_events(run, chart, rows)
    keys = [
        (COMPUTE, "computing all the time"),
        (COMPUTE + "77", "half of the time"),
        (PALETTE[9] + "55", "not at all"),
    ]
    if any(event.kind == "crash" for event in run.events):
        keys.append((LOST, "node is down"))
    wide = seconds(run.time_s / SLICES)
    return figure(
        join((legend(keys), chart.svg())), "The whole run: who computed when", f"One cell is {wide}."
    )


def busy_shares(spans: Spans, edges: Floats) -> Floats:
    """Share of each slice [edges[i], edges[i + 1]] that the spans cover, overlaps once: (len(edges) - 1,)."""
    start, end = union(spans.start_s, spans.end_s)
    before = np.concatenate(([0.0], np.cumsum(end - start)))  # covered seconds up to each interval's start
    started = np.searchsorted(start, edges, side="right")
    inside = np.zeros_like(edges)
    some = started > 0
    last = started[some] - 1
    inside[some] = before[last] + np.minimum(edges[some], end[last]) - start[last]
    return np.diff(inside) / np.diff(edges)


def _draw_levels(chart: Chart, busy: Floats, edges: Floats, row: int) -> None:
    """Cells of one opacity as one path, adjoining ones as one shape: a tenth of the bytes of single cells."""
    level = np.ceil(busy * _LEVELS - 1e-9).astype(int)
    top, height = chart.py(-row - 0.08), chart.py(-row - 0.92) - chart.py(-row - 0.08)
    for k in range(1, _LEVELS + 1):
        change = np.flatnonzero(np.diff(np.concatenate(([0], (level == k).astype(int), [0]))))
        path = "".join(
            f"M{chart.px(edges[a]):.1f} {top:.1f}h{chart.px(edges[b]) - chart.px(edges[a]):.1f}v{height:.1f}"
            f"H{chart.px(edges[a]):.1f}"
            for a, b in zip(change[::2], change[1::2], strict=True)
        )
        if path:
            chart.parts.append(
                f'<path d="{path}" fill="{COMPUTE}" opacity="{k / _LEVELS:.2f}" pointer-events="none"/>'
            )


def _mark_events(run: RunFiles, chart: Chart, rows: Sequence[int]) -> None:
    """A red strip while a node is down."""
    for node, start, end in down_times(run):
        if node in rows:
            row = rows.index(node)
            words = f"{run.names[node]} is down from {seconds(start)} to {seconds(end)}"
            chart.box((start, end), (-row - 0.85, -row - 0.15), LOST, words)


def down_times(run: RunFiles) -> list[tuple[int, float, float]]:
    """(node, from, until) in seconds, from each crash to the node's return or the end of the run."""
    since: dict[int, float] = {}
    found = []
    for event in run.events:
        if event.node is not None and event.kind == "crash":
            since.setdefault(event.node, event.time_s)
        elif event.node in since and event.kind == "back":
            found.append((event.node, since.pop(event.node), event.time_s))
    return found + [(node, start, run.time_s) for node, start in since.items()]


def choose_window(run: RunFiles, rows: Sequence[int]) -> tuple[float, float]:
    """(start, end) in seconds: from the start of the run until every row has some work items behind it.

    Long enough that the slower half of the rows show four work items each, short enough that no more than
    about MOST_SPANS spans are to be drawn.
    """
    fourth = []
    for node in rows:
        ends = np.sort(run.spans.by_node[node].of_kind("compute").end_s)
        fourth += [float(ends[min(3, len(ends) - 1)])] if len(ends) else []
    wanted = float(np.quantile(fourth, 0.75)) if fourth else run.time_s
    starts = np.sort(run.spans.start_s[np.isin(run.spans.node, rows)])
    limit = float(starts[MOST_SPANS]) if len(starts) > MOST_SPANS else run.time_s
    end = min(wanted * 1.05, limit, run.time_s)
    return 0.0, end if end > 0 else run.time_s


def _window(run: RunFiles, rows: Sequence[int]) -> Markup:
    start, end = choose_window(run, rows)
    chart = row_chart(
        "Work and transfers of each node", [run.names[i] for i in rows], (start, end),
        x_title="time", x_scale=time_scale(end), row=24,
    )  # fmt: skip
    for row, node in enumerate(rows):
        spans = run.spans.by_node[node]
        spans = spans.where((spans.end_s > start) & (spans.start_s < end))
        chart.box((start, end), (-row - 0.95, -row - 0.05), "#8881")
        _draw_spans(chart, spans.of_kind("compute"), (-row - 0.52, -row - 0.1), COMPUTE, (start, end))
        _draw_spans(chart, spans.of_kind("send"), (-row - 0.9, -row - 0.58), SEND, (start, end))
    keys = legend([(COMPUTE, "computing"), (SEND, "sending (waiting for the uplink included)")])
    shown = (
        f"from the start to {seconds(end)} of {seconds(run.time_s)}" if end < run.time_s else "the whole run"
    )
    caption = "Point at a span for what it was. Transfers that overlap are drawn as one."
    return figure(join((keys, chart.svg())), f"Work and transfers: {shown}", caption)


def _draw_spans(
    chart: Chart, spans: Spans, y: tuple[float, float], fill: str, x: tuple[float, float]
) -> None:
    start, end = union(spans.start_s, spans.end_s)
    place = np.searchsorted(start, spans.start_s, side="right") - 1
    for i, (a, b) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        inside = spans.detail[place == i]
        what = ", ".join(
            _counted(spans.names[code], int((inside == code).sum())) for code in np.unique(inside)
        )
        tip = f"{what}: {seconds(a)} to {seconds(b)}, {seconds(b - a)}"
        chart.box((max(a, x[0]), min(b, x[1])), y, fill, tip)


def _counted(what: str, count: int) -> str:
    return f"{count} × {what}" if count > 1 else what
