"""How the model got better: the metric over time, bytes and joules, and its spread over the nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from edgefl.experiment.report.html import Markup, figure, join, legend, paragraph
from edgefl.experiment.report.read import CurvePoint, RunFiles, Series, as_float
from edgefl.experiment.report.svg import PALETTE, Chart, Point, bounds, colour, span
from edgefl.experiment.report.units import Scale, number, plain, prefix_scale, scaled, seconds, time_scale

MOST_POINTS, MOST_BARS = 400, 240
LINE, LOSS, TRAIN = PALETTE[0], PALETTE[3], PALETTE[9]
Item = TypeVar("Item")


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """At most about `most` of `items`, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    places = np.linspace(0, len(items) - 1, most).round().astype(int)
    return [items[i] for i in places]


def metric_name(run: RunFiles) -> str:
    """What the curve shows: "accuracy", "rmse", ..."""
    target = run.summary.get("target")
    named = run.summary.get("metric") or (target.get("metric") if isinstance(target, dict) else None)
    if named:
        return str(named)
    return "accuracy" if run.summary.get("final_accuracy") is not None else "metric"


def target_value(run: RunFiles) -> float | None:
    """The metric's value that the run was to reach, or None."""
    target = run.summary.get("target")
    return as_float(target.get("value")) if isinstance(target, dict) else None


def curves(run: RunFiles) -> Markup:
    """The metric over time, payload bytes and joules, and the loss over time."""
    if not run.curve:
        return Markup("")
    points = thinned(run.curve, MOST_POINTS)
    name = metric_name(run)
    time = time_scale(points[-1].time_s)
    clock = "virtual time" if run.summary.get("runtime") == "virtual" else "time"
    charts = [
        _metric_chart(run, points, f"{name} over {clock}", clock, time, lambda p: p.time_s),
        _metric_chart(
            run, points, f"{name} over payload sent", "payload sent by all nodes",
            prefix_scale(points[-1].payload_bytes or 0.0, "B"), lambda p: p.payload_bytes,
        ),
        _metric_chart(
            run, points, f"{name} over energy", "modelled energy of all nodes",
            prefix_scale(points[-1].joules or 0.0, "J"), lambda p: p.joules,
        ),
        _loss_chart(run, points, clock, time),
    ]  # fmt: skip
    has_target = target_value(run) is not None
    note = f"Point at a curve for its figures.{' The dashed line is the target.' if has_target else ''}"
    return join((Markup('<div class="grid2">'), *charts, Markup("</div>"), paragraph(note, "note")))


def _keys(run: RunFiles) -> Markup:
    band = [(LINE + "44", "worst tenth of the nodes to the best node")] if has_spread(run) else []
    return legend([(LINE, metric_name(run)), *band])


def has_spread(run: RunFiles) -> bool:
    """Whether the nodes' metrics differ at all; one model of a server has no spread."""
    return any(p.worst_tenth is not None and p.worst_tenth != p.best for p in run.curve)


def _metric_chart(
    run: RunFiles,
    points: Sequence[CurvePoint],
    title: str,
    x_title: str,
    scale: Scale,
    x: Callable[[CurvePoint], float | None],
) -> Markup:
    placed = [(at, p) for p in points if (at := x(p)) is not None]
    if len({at for at, _ in placed}) < 2:
        return Markup("")
    target = target_value(run)
    shown = [v for _, p in placed for v in (p.value, p.worst_tenth, p.best) if v is not None]
    limits = span(shown + ([] if target is None else [target]))
    chart = Chart(title, bounds((at for at, _ in placed), zero=True), limits, x_title=x_title, x_scale=scale)
    if has_spread(run):
        lower = [(at, p.worst_tenth) for at, p in placed if p.worst_tenth is not None and p.best is not None]
        upper = [(at, p.best) for at, p in placed if p.worst_tenth is not None and p.best is not None]
        chart.band(lower, upper, LINE)
    if target is not None:
        chart.level(target, f"target {plain(target)}", below=placed[-1][1].value >= target)
    line = [(at, p.value) for at, p in placed]
    chart.line(line, LINE)
    chart.hover(line, [_tip(run, p) for _, p in placed], LINE)
    _mark_reached(run, chart, placed)
    return figure(join((_keys(run), chart.svg())), title[:1].upper() + title[1:])


def _mark_reached(run: RunFiles, chart: Chart, placed: Sequence[tuple[float, CurvePoint]]) -> None:
    """A dot where the run first met its target."""
    reached = as_float(run.summary.get("time_to_target_s"))
    after = [(at, p) for at, p in placed if reached is not None and p.time_s >= reached]
    if after:
        at, p = after[0]
        chart.dot((at, p.value), PALETTE[2], f"target reached: {_tip(run, p)}", 5)


def _tip(run: RunFiles, p: CurvePoint) -> str:
    words = [f"{metric_name(run)} {number(p.value, 4)} at {seconds(p.time_s)}"]
    if has_spread(run) and p.worst_tenth is not None:
        words.append(f"worst tenth {number(p.worst_tenth)}, best {number(p.best)}")
    if p.loss is not None:
        words.append(f"loss {number(p.loss)}")
    words += [f"payload {scaled(p.payload_bytes, 'B')}"] if p.payload_bytes is not None else []
    words += [f"modelled energy {scaled(p.joules, 'J')}"] if p.joules is not None else []
    return "; ".join(words)


def _loss_chart(run: RunFiles, points: Sequence[CurvePoint], clock: str, time: Scale) -> Markup:
    test = [(p.time_s, p.loss) for p in points if p.loss is not None]
    train = _averaged(run.metrics["train_loss"]) if "train_loss" in run.metrics else []
    if len(test) + len(train) < 2:
        return Markup("")
    losses = [y for _, y in [*test, *train]]
    limits = (min(0.0, *losses), _without_peaks(losses))
    chart = Chart(
        "Loss over time",
        bounds([x for x, _ in [*test, *train]], zero=True),
        limits,
        x_title=clock,
        x_scale=time,
    )
    keys = []
    for name, line, stroke in (
        ("training loss, mean of what nodes recorded", train, TRAIN),
        ("test loss", test, LOSS),
    ):
        if line:
            cut = [(x, min(y, limits[1])) for x, y in line]
            chart.line(cut, stroke)
            chart.hover(cut, [f"{name}: {number(y)} at {seconds(x)}" for x, y in line], stroke)
            keys.append((stroke, name))
    cut_off = " (higher values are drawn at the top)" if max(losses) > limits[1] else ""
    return figure(join((legend(keys), chart.svg())), f"Loss over {clock}{cut_off}")


def _without_peaks(values: Sequence[float]) -> float:
    """The top of a loss axis: one early peak does not flatten the rest."""
    high, usual = max(values), float(np.quantile(values, 0.95))
    return min(high, 2.5 * usual) * 1.05 if high > 0 else 1.0


def _averaged(series: Series, most: int = 50) -> list[Point]:
    """Means of a metric over up to about `most` groups of records, at the mean time of each.

    Consecutive records form a group, as many as fall on every node alike: nodes with a high and with a low
    loss do not take turns.
    """
    nodes = len(np.unique(series.node))
    size = nodes * math.ceil(len(series.value) / (most * nodes))
    starts = np.arange(0, len(series.value), size)
    counts = np.diff(np.append(starts, len(series.value)))
    x = np.add.reduceat(series.time_s, starts) / counts
    y = np.add.reduceat(series.value, starts) / counts
    return list(zip(x.tolist(), y.tolist(), strict=True))


def devices_of(run: RunFiles) -> list[str]:
    """The fleet's device names, in the order of their first node; colours follow this order."""
    return list(dict.fromkeys(node.device or node.role for node in run.nodes))


def node_spread(run: RunFiles) -> Markup:
    """Each node's own final metric, sorted, coloured by device."""
    ranked = sorted((n for n in run.nodes if n.metric is not None), key=lambda n: (n.metric, n.id))
    if len(ranked) < 2:
        return Markup("")
    name, devices = metric_name(run), devices_of(run)
    shown = thinned(ranked, MOST_BARS)
    values = [n.metric for n in shown if n.metric is not None]
    mean = math.fsum(n.metric or 0.0 for n in ranked) / len(ranked)
    chart = Chart(
        f"Final {name} of each node", (0, len(shown)), (min(0.0, *values), span(values)[1]),
        width=1120, height=260, x_ticks=False, x_title=f"nodes, sorted by final {name}",
    )  # fmt: skip
    for i, node in enumerate(shown):
        fill = colour(devices.index(node.device or node.role), len(devices))
        tip = f"{node.name}: {name} {number(node.metric, 4)}, {number(node.num_examples)} examples"
        chart.box((i + 0.1, i + 0.9), (min(0.0, *values), node.metric or 0.0), fill, tip)
    chart.level(mean, f"mean {number(mean)}", left=True)
    used = {n.device or n.role for n in shown}
    keys = legend((colour(i, len(devices)), d) for i, d in enumerate(devices) if d in used)
    few = (
        f" {len(shown)} of {len(ranked)} nodes are drawn, evenly spaced in rank."
        if len(shown) < len(ranked)
        else ""
    )
    caption = f"From {number(ranked[0].metric)} to {number(ranked[-1].metric)} over {len(ranked)} nodes.{few}"
    return figure(join((keys, chart.svg())), f"Final {name} of each node", caption)
