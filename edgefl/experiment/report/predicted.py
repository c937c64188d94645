"""Predicted beside measured: each device's share of a round, and what virtual time says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgefl.experiment.report.html import Markup, folded, join, paragraph, table
from edgefl.experiment.report.read import RunFiles, as_float, figure, rows
from edgefl.experiment.report.units import error, number, scaled, seconds

FIGURES = (("round_s", "s of a round"), ("sent_bytes", "sent"), ("busy_s", "busy"), ("joules", "energy"))
_MOST_ROWS = 40


def predicted(run: RunFiles) -> Markup:
    """The whole run's figures, then those of each node; nothing for a run without a prediction."""
    found = run.summary.get("predicted")
    if not isinstance(found, Mapping):
        return Markup("")
    if "failed" in found:
        return paragraph(f"Virtual time has no prediction for this run: {found['failed']}.", "note")
    whole = [(word, *_pair(found.get(key), key)) for key, word in (
        ("round_s", "time of a round"), ("sent_bytes", "sent in a round, all nodes"),
        ("busy_s", "computing in a round, all nodes"),
    )]  # fmt: skip
    note = paragraph(
        f"All figures are per round, over {number(as_float(found.get('rounds')))} rounds. Predicted: the"
        " programs in virtual time, without training, on the devices and links of the file, link model"
        f" {found.get('link_model')}. {_conditions(run)}",
        "note",
    )
    headers = ("whole run", "measured", "predicted", "error")
    return join((Markup('<div class="panel">'), table(headers, whole), note, Markup("</div>"), _by_node(run)))


def _conditions(run: RunFiles) -> str:
    """What of the file's fleet this run really had."""
    if run.summary.get("runtime") != "local":
        return "Measured: the devices as they were."
    execution, network = run.experiment.get("execution") or {}, run.info.get("network") or {}
    slowed = (
        "slowed to the file's devices" if execution.get("emulate") else "not slowed to the file's devices"
    )
    linked = "over links shaped for real" if network.get("lab") else "over loopback"
    return f"Measured: on one machine, {slowed}, {linked}."


def _by_node(run: RunFiles) -> Markup:
    found = list(rows(run.folder / "predicted.csv"))[:_MOST_ROWS]
    if not found:
        return Markup("")
    cells = []
    for row in found:
        cell: list[Any] = [run.names[int(figure(row, "node") or 0)]]
        for key, _ in FIGURES:
            cell += _cells(figure(row, key), figure(row, f"predicted_{key}"), key)
        cells.append(cell)
    headers = ["node"]
    for _, word in FIGURES:
        headers += [word, "predicted", "error"]
    return folded("Node by node", table(headers, cells))


def _pair(found: object, key: str) -> Sequence[str]:
    pair = found if isinstance(found, Mapping) else {}
    return _cells(as_float(pair.get("measured")), as_float(pair.get("predicted")), key)


def _cells(measured: float | None, foreseen: float | None, key: str) -> list[str]:
    shown = seconds if key.endswith("_s") else lambda value: scaled(value, "J" if key == "joules" else "B")
    return [shown(measured), shown(foreseen), error(measured, foreseen)]
