"""What was sent, how stale it was, who reported, and what happened on the way."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from edgefl.experiment.report.html import Markup, element, figure, join, legend, table
from edgefl.experiment.report.read import RunFiles, as_float
from edgefl.experiment.report.svg import PALETTE, Chart, bounds
from edgefl.experiment.report.units import number, scaled, seconds, share

MOST_EVENTS, MOST_BARS = 100, 60


def traffic(run: RunFiles) -> Markup:
    """Messages and bytes by kind, and the busiest pairs."""
    if not run.traffic:
        return Markup("")
    kinds: dict[str, list[float]] = {}
    pairs: Counter[tuple[int, int]] = Counter()
    for (sender, receiver, kind), counts in run.traffic.items():
        old = kinds.setdefault(kind, [0.0, 0.0, 0.0])
        kinds[kind] = [a + b for a, b in zip(old, counts, strict=True)]
        pairs[sender, receiver] += int(counts[2])
    everything = sum(counts[2] for counts in kinds.values())
    by_kind = [
        (kind, number(m), scaled(payload, "B"), scaled(encoded, "B"), scaled(encoded / m if m else None, "B"),
         share(encoded, everything))
        for kind, (m, payload, encoded) in sorted(kinds.items(), key=lambda item: (-item[1][2], item[0]))
    ]  # fmt: skip
    by_pair = [
        (run.names[a], run.names[b], scaled(count, "B"), share(count, everything))
        for (a, b), count in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:8]
    ]
    kinds_table = table(("kind", "messages", "payload", "encoded", "encoded per message", "share"), by_kind)
    pairs_table = table(("from", "to", "encoded", "share"), by_pair, 2)
    wire = scaled(as_float(run.summary.get("wire_bytes")), "B")
    note = (
        "Payload: the values that were sent. Encoded: what the codec makes of them, headers of the message"
        f" included. On the wire, headers of all layers included: {wire}, modelled."
    )
    return join(
        (
            Markup('<div class="panel"><h3>By kind of message</h3>'), kinds_table, element("p", note, "note"),
            Markup(f'</div><div class="panel"><h3>Busiest of {len(pairs):,} pairs</h3>'), pairs_table,
            Markup("</div>"),
        )
    )  # fmt: skip


def updates(run: RunFiles) -> Markup:
    """Staleness, and reports received and missing, where the method records them."""
    charts = [chart for chart in (_staleness(run), _reports(run)) if chart]
    if not charts:
        why = _why_missing(run)
        return element("p", f"Updates that did not count{why}.") if why else Markup("")
    return join((Markup('<div class="grid2">'), *charts, Markup("</div>")))


def _staleness(run: RunFiles) -> Markup:
    if "staleness" not in run.metrics:
        return Markup("")
    values = np.maximum(run.metrics["staleness"].value, 0)
    width = max(1, math.ceil((values.max() + 1) / 40))
    counts = np.bincount((values // width).astype(int))
    chart = Chart("Staleness of updates", (0, width * len(counts)), bounds(counts.tolist(), zero=True),
                  x_title="staleness (global versions)")  # fmt: skip
    for i, count in enumerate(counts.tolist()):
        which = f"{i * width}" if width == 1 else f"{i * width} to {(i + 1) * width - 1}"
        box = (width * (i + 0.06), width * (i + 0.94))
        chart.box(box, (0, count), PALETTE[4], f"{count:,} updates with staleness {which}")
    middle = float(np.median(values))
    chart.upright(middle + 0.5)
    why = _why_missing(run)
    lost = f" Others did not count{why}." if why else ""
    caption = (
        f"{len(values):,} updates, up to {number(float(values.max()))} versions old, the median"
        f" {number(middle)} (dashed).{lost} The y axis counts updates."
    )
    return figure(chart.svg(), "Staleness of updates", caption)


def _reports(run: RunFiles) -> Markup:
    """Reports received and missing by round, means of several rounds where there are many."""
    if "reports" not in run.metrics:
        return Markup("")
    reports = run.metrics["reports"].value
    missing = run.metrics["missing"].value if "missing" in run.metrics else np.zeros(0)
    if len(missing) != len(reports):  # not recorded together
        missing = np.zeros_like(reports)
    width = math.ceil(len(reports) / MOST_BARS)
    top = float((reports + missing).max())
    chart = Chart("Reports of each round", (0.0, float(len(reports))), (0.0, top or 1.0), x_title="round")
    for start in range(0, len(reports), width):
        end = min(start + width, len(reports))
        got, lost = float(reports[start:end].mean()), float(missing[start:end].mean())
        which = f"round {start}" if width == 1 else f"rounds {start} to {end - 1}, mean"
        box = (start + 0.08 * width, end - 0.08 * width)
        chart.box(box, (0.0, got), PALETTE[2], f"{which}: {number(got)} reports, {number(lost)} missing")
        if lost:
            chart.box(box, (got, got + lost), PALETTE[3], f"{which}: {number(lost)} missing")
    keys = legend([(PALETTE[2], "received"), (PALETTE[3], "missing")])
    few = f" A bar is the mean of {width} rounds." if width > 1 else ""
    caption = (
        f"{len(reports):,} rounds; {number(float(reports.sum()))} reports arrived in time and"
        f" {number(float(missing.sum()))} did not{_why_missing(run)}.{few} The y axis counts clients."
    )
    return figure(join((keys, chart.svg())), "Reports of each round", caption)


def _why_missing(run: RunFiles) -> str:
    """How many were late, dropped, lost with their node, or refused, where the method says so."""
    words = {
        "late": "late",
        "dropped": "dropped as too old",
        "lost": "lost with their node",
        "refused": "refused",
    }
    totals = {word: run.metrics[key].value.sum() for key, word in words.items() if key in run.metrics}
    found = [f"{number(float(total))} {word}" for word, total in totals.items() if total]
    return f" ({', '.join(found)})" if found else ""


def events(run: RunFiles) -> Markup:
    """Crashes, returns and what else was worth a line."""
    if not run.events:
        return Markup("")
    counts = Counter(event.kind for event in run.events)
    words = ", ".join(f"{count:,} × {kind}" for kind, count in counts.most_common())
    rows = [
        (seconds(e.time_s), e.kind, "the run" if e.node is None else run.names[e.node], e.detail)
        for e in run.events[:MOST_EVENTS]
    ]
    few = f"; the first {MOST_EVENTS} below, all in events.csv" if len(run.events) > MOST_EVENTS else ""
    body = table(("time", "kind", "node", "detail"), rows, 4)
    return join(
        (
            element("p", f"{words}{few}."),
            Markup("<details><summary>Show them</summary>"),
            body,
            Markup("</details>"),
        )
    )
