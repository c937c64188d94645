"""Several runs side by side: methods, or settings of one method, over seeds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from edgefl.errors import ConfigError
from edgefl.experiment.batch import Result
from edgefl.experiment.comparison import flat, summarize
from edgefl.experiment.report.curves import metric_name, target_value
from edgefl.experiment.report.html import (
    Markup,
    cards,
    element,
    figure,
    join,
    legend,
    page,
    paragraph,
    table,
)
from edgefl.experiment.report.read import CurvePoint, Floats, RunFiles, as_float
from edgefl.experiment.report.run import status
from edgefl.experiment.report.svg import Chart, bounds, colour, row_chart, span
from edgefl.experiment.report.units import (
    NONE,
    PLAIN,
    Scale,
    number,
    plain,
    plus_minus,
    prefix_scale,
    scaled,
    seconds,
    time_scale,
)
from edgefl.whole import write_whole

GRID = 160
Pick = Callable[[CurvePoint], float | None]
Groups = Mapping[str, Sequence[RunFiles]]
_AXES: tuple[tuple[str, str, Pick, Callable[[float], Scale]], ...] = (
    ("time", "time of the run", lambda p: p.time_s, time_scale),
    ("payload sent", "payload sent by all nodes", lambda p: p.payload_bytes, lambda x: prefix_scale(x, "B")),
    ("energy", "modelled energy of all nodes", lambda p: p.joules, lambda x: prefix_scale(x, "J")),
)


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Write the comparison of at least one run and return its path.

    out: the .html file, or the folder that gets comparison.html. Runs are grouped by method, and by those
    settings in which runs of one method differ; each group's runs are its seeds. Links to the runs' reports
    are relative to `out`. Raises ConfigError where one of `folders` is no run folder, or none is given.
    """
    if not folders:
        raise ConfigError("runs", [], "at least one run folder")
    out = Path(out)
    path = out if out.suffix == ".html" else out / "comparison.html"
    runs = [RunFiles(Path(folder)) for folder in dict.fromkeys(folders)]
    groups = grouped(runs)
    results = {r.folder: _result(label, r) for label, members in groups.items() for r in members}
    rows = summarize([results[r.folder] for members in groups.values() for r in members])
    sections = [
        ("result", "Result", _result_table(groups, rows)),
        ("curves", "Learning curves", _curves(groups)),
        ("time", "Time to target", _time_bars(groups)),
        ("cost", "What it cost", _cost_table(groups, rows)),
        ("runs", "Runs", _runs_table(groups, path.parent)),
    ]
    title = f"{len(groups)} {'methods' if _only_methods(groups) else 'variants'} compared"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page(f"{title} · edgefl", _header(title, runs, groups, rows), sections))
    return path


def grouped(runs: Sequence[RunFiles]) -> dict[str, list[RunFiles]]:
    """Runs by "method", or by "method, key = value, ..." where runs of a method differ in those keys.

    Where all runs are of one method, its name is left out of the latter.
    """
    settings = {run.folder: _settings(run) for run in runs}
    several = len({run.summary.get("method") or "run" for run in runs}) > 1
    groups: dict[str, list[RunFiles]] = {}
    for run in runs:
        method = str(run.summary.get("method") or "run")
        siblings = [settings[r.folder] for r in runs if (r.summary.get("method") or "run") == method]
        own = settings[run.folder]
        varied = [key for key in own if any(other.get(key) != own[key] for other in siblings)]
        values = [f"{key.removeprefix(f'method.{method}.')} = {own[key]}" for key in varied]
        label = ", ".join([method, *values] if several or not values else values)
        groups.setdefault(label, []).append(run)
    return groups


def _settings(run: RunFiles) -> dict[str, Any]:
    return {key: value for key, value in flat(run.experiment).items() if key not in ("seed", "name")}


def _result(label: str, run: RunFiles) -> Result:
    return Result(str(run.folder), label, int(as_float(run.summary.get("seed")) or 0), run.summary or None)


def _only_methods(groups: Groups) -> bool:
    return not any(" = " in label for label in groups)


def _what(groups: Groups) -> str:
    """The heading of the column that says what is compared."""
    return "method" if _only_methods(groups) else "settings"


def _seeds(runs: Sequence[RunFiles]) -> list[str]:
    return list(dict.fromkeys(str(run.summary.get("seed", "?")) for run in runs))


def _header(
    title: str, runs: Sequence[RunFiles], groups: Groups, rows: Sequence[Mapping[str, Any]]
) -> Markup:
    name = next((run.experiment["name"] for run in runs if run.experiment.get("name")), "")
    seeds = _seeds(runs)
    entries: list[tuple[object, object, object]] = []
    for what, key, write, of in (
        ("Fastest to the target", "time_to_target_s", seconds, min),
        ("Highest final accuracy", "final_accuracy", number, max),
        ("Least payload sent", "payload_bytes", lambda v: scaled(v, "B"), min),
        ("Least energy (modelled)", "joules", lambda v: scaled(v, "J"), min),
    ):
        known = [row for row in rows if row[key] is not None]
        if known:
            best = of(row[key] for row in known)
            who = [row["variant"] for row in known if row[key] == best]
            entries.append((what, ", ".join(who) if len(who) < 3 else f"{len(who)} alike", write(best)))
    methods = {str(run.summary.get("method") or "run") for run in runs}
    alone = f" of {methods.pop()}" if len(methods) == 1 and not _only_methods(groups) else ""
    words = f"{len(runs)} runs{alone}, {len(seeds)} {'seeds' if len(seeds) > 1 else 'seed'}"
    return join(
        (
            element("p", " · ".join(["edgefl", *([str(name)] if name else []), "comparison"]), "eyebrow"),
            element("h1", title),
            paragraph(f"{words} ({', '.join(seeds[:12])}).", "lead"),
            cards(entries),
        )
    )


def _plus_minus(
    row: Mapping[str, Any],
    key: str,
    write: Callable[[float | None], str],
    scale: Callable[[float], Scale] = lambda mean: PLAIN,
) -> str:
    """A mean as `write` has it, or with half its interval on the scale that fits the mean."""
    mean, half = row[key], row[f"{key}_ci95"]
    return write(mean) if half is None else plus_minus(mean, half, scale(mean))


def _time(row: Mapping[str, Any], key: str) -> str:
    return _plus_minus(row, key, seconds, time_scale)


def _amount(row: Mapping[str, Any], key: str, unit: str) -> str:
    return _plus_minus(row, key, lambda v: scaled(v, unit), lambda mean: prefix_scale(mean, unit))


def _swatch(index: int, label: str, of: int) -> Markup:
    return join((Markup(f'<span class="swatch"><i style="background:{colour(index, of)}"></i>'),
                 element("b", label), Markup("</span>")))  # fmt: skip


def _result_table(groups: Groups, rows: Sequence[Mapping[str, Any]]) -> Markup:
    every = [run for members in groups.values() for run in members]
    name = metric_name(every[0]) if every else "metric"
    targets = sorted({plain(t) for run in every if (t := target_value(run)) is not None})
    body = [
        (
            _swatch(i, row["variant"], len(rows)), row["runs"],
            *((f"{row['reached']} of {row['runs']}", _time(row, "time_to_target_s")) if targets else ()),
            _plus_minus(row, "final_metric" if row["final_accuracy"] is None else "final_accuracy", number),
            _plus_minus(row, "worst_tenth", number), _plus_minus(row, "final_loss", number),
            number(row["rank"]),
        )
        for i, row in enumerate(rows)
    ]  # fmt: skip
    goal = ("reached the target", f"time to target ({name} {' or '.join(targets)})") if targets else ()
    headers = (
        _what(groups),
        "runs",
        *goal,
        f"final {name}",
        "worst tenth of nodes",
        "final loss",
        "mean rank",
    )
    mean = " Time to target is the mean over the runs that reached it." if targets else ""
    order = "time to target, then by the final" if targets else "the final"
    note = paragraph(
        f"Mean ± half of the 95 % interval over seeds (Student's t; none for a single run).{mean} Rank:"
        f" within each seed by {order} result; equal ones share the mean of their places.",
        "note",
    )
    return join((Markup('<div class="panel">'), table(headers, body), note, Markup("</div>")))


def _cost_table(groups: Groups, rows: Sequence[Mapping[str, Any]]) -> Markup:
    body = [
        (
            _swatch(i, row["variant"], len(rows)), _time(row, "time_s"),
            _amount(row, "payload_bytes", "B"),
            _amount(row, "wire_bytes", "B"),
            _time(row, "busy_s"), _time(row, "idle_s"),
            _amount(row, "joules", "J"),
        )
        for i, row in enumerate(rows)
    ]  # fmt: skip
    headers = (_what(groups), "time of the run", "payload sent", "on the wire (modelled)", "busy device time",
               "idle device time", "energy (modelled)")  # fmt: skip
    return join((Markup('<div class="panel">'), table(headers, body), Markup("</div>")))


def _curves(groups: Groups) -> Markup:
    charts = [_curve_chart(groups, *axis) for axis in _AXES]
    if not any(charts):
        return Markup("")
    keys = legend((colour(i, len(groups)), label) for i, label in enumerate(groups))
    several = any(len(members) > 1 for members in groups.values())
    note = (
        "Line: median over seeds; band: from the lowest to the highest seed, as far as every seed of it goes."
        if several
        else ""
    )
    return join((keys, Markup('<div class="grid2">'), *charts, Markup("</div>"), paragraph(note, "note")))


def over_seeds(runs: Sequence[RunFiles], pick: Pick) -> tuple[Floats, Floats]:
    """(x, values): a grid (GRID,) as far as the curves of all runs go, and each run's metric on it.

    values: (runs with a curve, GRID), straight between two evaluations. Both are empty without curves.
    """
    lines = []
    for run in runs:
        points = [(x, p.value) for p in run.curve if (x := pick(p)) is not None]
        if len(points) > 1:
            lines.append(np.array(points).T)
    if not lines:
        return np.empty(0), np.empty((0, 0))
    grid = np.linspace(max(line[0, 0] for line in lines), min(line[0, -1] for line in lines), GRID)
    return grid, np.array([np.interp(grid, line[0], line[1]) for line in lines])


def _curve_chart(
    groups: Groups, name: str, title: str, pick: Pick, scale: Callable[[float], Scale]
) -> Markup:
    found = {label: over_seeds(runs, pick) for label, runs in groups.items()}
    found = {label: (x, values) for label, (x, values) in found.items() if len(x) and x[-1] > x[0]}
    if not found:
        return Markup("")
    every = [run for runs in groups.values() for run in runs]
    metric, targets = metric_name(every[0]), sorted({t for r in every if (t := target_value(r)) is not None})
    longest = max(float(x[-1]) for x, _ in found.values())
    heights = [float(v) for _, values in found.values() for v in (values.min(), values.max())]
    chart = Chart(f"{metric} over {name}", bounds([0.0, longest]), span(heights + targets), x_title=title,
                  x_scale=scale(longest))  # fmt: skip
    for target in targets:
        chart.level(target, f"target {plain(target)}", below=True)
    for i, label in enumerate(groups):
        if label in found:
            x, values = found[label]
            stroke, middle = colour(i, len(groups)), np.median(values, axis=0)
            if len(values) > 1:
                chart.band(_points(x, values.min(axis=0)), _points(x, values.max(axis=0)), stroke)
            line = _points(x, middle)
            chart.line(line, stroke)
            chart.hover(line, [f"{label}: {metric} {number(y)}" for _, y in line], stroke)
    return figure(chart.svg(), f"{metric[:1].upper()}{metric[1:]} over {name}")


def _points(x: Floats, y: Floats) -> list[tuple[float, float]]:
    return list(zip(x.tolist(), y.tolist(), strict=True))


def _time_bars(groups: Groups) -> Markup:
    """One dot per seed that reached the target, on the time axis; one row per method."""
    times = {
        label: [(run, t) for run in runs if (t := as_float(run.summary.get("time_to_target_s"))) is not None]
        for label, runs in groups.items()
    }
    known = [t for found in times.values() for _, t in found]
    if not known:
        return Markup("")
    scale = time_scale(max(known))
    chart = row_chart("Time to target of each seed", list(times), (0.0, max(*known, 1e-9) * 1.04), row=34,
                      x_title="time to target", x_scale=scale)  # fmt: skip
    for row, (label, found) in enumerate(times.items()):
        fill = colour(row, len(times))
        if found:
            middle = float(np.median([t for _, t in found]))
            chart.box((0.0, middle), (-row - 0.8, -row - 0.2), fill + "55" if fill[0] == "#" else fill,
                      f"{label}: median {seconds(middle)}")  # fmt: skip
        else:
            chart.text(chart.left + 8, chart.py(-row - 0.5) + 4, "no seed reached the target")
        for run, t in found:
            chart.dot((t, -row - 0.5), fill, f"{label}, seed {run.summary.get('seed')}: {seconds(t)}", 4.5)
    return figure(
        chart.svg(), "Time to target of each seed", "Bar: median of the seeds that reached it; dot: one seed."
    )


def _runs_table(groups: Groups, base: Path) -> Markup:
    body, has_target = [], any(target_value(run) is not None for runs in groups.values() for run in runs)
    for label, runs in groups.items():
        for run in runs:
            s, (word, reason) = run.summary, status(run)
            final = as_float(s.get("final_metric", s.get("final_accuracy")))
            ended = f"{word}: {reason}" if reason and reason != word else word
            body.append(
                (
                    _report_link(run, base), label, s.get("seed"), ended,
                    *((seconds(as_float(s.get("time_to_target_s"))),) if has_target else ()), number(final),
                    scaled(as_float(s.get("payload_bytes")), "B"), scaled(as_float(s.get("joules")), "J"),
                )
            )  # fmt: skip
    headers = ("run", _what(groups), "seed", "status", *(("time to target",) if has_target else ()),
               "final metric", "payload sent", "energy (modelled)")  # fmt: skip
    return join((Markup('<div class="panel">'), table(headers, body, 4), Markup("</div>")))


def _report_link(run: RunFiles, base: Path) -> object:
    report = run.folder / "report.html"
    if not report.exists():
        return run.folder.name or NONE
    address = quote(Path(os.path.relpath(report, base)).as_posix())
    return join((Markup(f'<a href="./{address}">'), run.folder.name, Markup("</a>")))
