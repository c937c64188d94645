"""Predicted beside measured: each device's share of a round, and what virtual time says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgefl.experiment.report.html import Markup, folded, join, paragraph, table
from edgefl.experiment.report.read import RunFiles, as_float, figure, rows
from edgefl.experiment.report.units import NONE, error, number, scaled, seconds
from edgefl.network.link import Access

FIGURES = (("round_s", "s of a round"), ("sent_bytes", "sent"), ("busy_s", "busy"), ("joules", "energy"))
_MOST_ROWS = 40


def predicted(run: RunFiles, access: Mapping[int, Access]) -> Markup:
    """The whole run's figures, those of each node, and links; nothing for a run that has none of them.

    access: how each node is connected, as the file says.
    """
    found = run.summary.get("predicted")
    if not isinstance(found, Mapping):
        return _links(run, access)
    if "failed" in found:
        return paragraph(f"Virtual time has no prediction for this run: {found['failed']}.", "note")
    same = found.get("same_devices", True)
    whole = [(word, *_pair(found.get(key), key, same)) for key, word in (
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
    panel = (Markup('<div class="panel">'), table(headers, whole), note, Markup("</div>"))
    return join((*panel, _by_node(run, same), _links(run, access)))


def _conditions(run: RunFiles) -> str:
    """What of the file's fleet this run really had."""
    if run.summary.get("runtime") != "local":
        return "Measured: the devices as they were."
    execution, network = run.experiment.get("execution") or {}, run.info.get("network") or {}
    slowed = (
        "slowed to the file's devices" if execution.get("emulate") else "not slowed to the file's devices"
    )
    linked = "over links shaped for real" if network.get("lab") else "over loopback"
    apart = (
        "" if execution.get("emulate") else " Times and joules are those of two fleets, and are not compared."
    )
    return f"Measured: on one machine, {slowed}, {linked}.{apart}"


def _by_node(run: RunFiles, same: bool) -> Markup:
    found = list(rows(run.folder / "predicted.csv"))[:_MOST_ROWS]
    if not found:
        return Markup("")
    cells = []
    for row in found:
        cell: list[Any] = [run.names[int(figure(row, "node") or 0)]]
        for key, _ in FIGURES:
            cell += _cells(figure(row, key), figure(row, f"predicted_{key}"), key, same)
        cells.append(cell)
    headers = ["node"]
    for _, word in FIGURES:
        headers += [word, "predicted", "error"]
    return folded("Node by node", table(headers, cells))


def _links(run: RunFiles, access: Mapping[int, Access]) -> Markup:
    """The way to the lead as each node's process measured it when it joined, beside what the file says."""
    cells, lead = [], access.get(0)
    for word, link in list((run.info.get("links") or {}).items())[:_MOST_ROWS]:
        own = access.get(int(word))
        planned: tuple[float | None, ...] = (None, None, None)
        if own is not None and lead is not None:
            up = min(own.up_bytes_per_s, lead.down_bytes_per_s)
            down = min(own.down_bytes_per_s, lead.up_bytes_per_s)
            planned = (up, down, own.latency_s + lead.latency_s)
        cell: list[Any] = [run.names[int(word)]]
        for key, of_plan in zip(("up_bytes_per_s", "down_bytes_per_s", "latency_s"), planned, strict=True):
            shown = seconds if key == "latency_s" else _rate
            seen = as_float(link.get(key))
            cell += [shown(seen), shown(of_plan), error(seen, of_plan)]
        cells.append(cell)
    headers = ["way to the lead"]
    for what in ("up", "down", "latency"):
        headers += [what, "in the file", "error"]
    title = "Links, as processes measured them when they joined"
    return folded(title, table(headers, cells)) if cells else Markup("")


def _rate(bytes_per_s: float | None) -> str:
    return scaled(bytes_per_s, "B/s")


def _pair(found: object, key: str, same: bool) -> Sequence[str]:
    pair = found if isinstance(found, Mapping) else {}
    return _cells(as_float(pair.get("measured")), as_float(pair.get("predicted")), key, same)


def _cells(measured: float | None, foreseen: float | None, key: str, same: bool) -> list[str]:
    """same: measured on devices like the file's; bytes are the same on any."""
    shown = seconds if key.endswith("_s") else lambda value: scaled(value, "J" if key == "joules" else "B")
    compared = same or key == "sent_bytes"
    return [shown(measured), shown(foreseen), error(measured, foreseen) if compared else NONE]
