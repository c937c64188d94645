"""The report of one run: a single HTML file that needs no network, made from the run folder's files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgefl.experiment.comparison import flat
from edgefl.experiment.report.curves import curves, has_spread, metric_name, node_spread, target_value
from edgefl.experiment.report.fleet import fleet, partition
from edgefl.experiment.report.html import Markup, cards, element, folded, join, page, paragraph, table
from edgefl.experiment.report.intervals import uses
from edgefl.experiment.report.links import access_by_node, link_uses
from edgefl.experiment.report.predicted import predicted
from edgefl.experiment.report.read import RunFiles, as_float
from edgefl.experiment.report.slow import why_slow
from edgefl.experiment.report.timeline import timeline
from edgefl.experiment.report.traffic import events, traffic, updates
from edgefl.experiment.report.units import number, plain, scaled, seconds, share
from edgefl.whole import write_whole

TONES = {"finished": "good", "stopped": "", "running": "warn", "failed": "bad", "interrupted": "bad"}


def write_report(folder: Path) -> Path:
    """Write folder/report.html and return its path.

    Files of the folder may be empty or missing, but for run.json; what they would say is left out.
    Raises ConfigError where `folder` is no run folder.
    """
    run = RunFiles(Path(folder))
    path = run.folder / "report.html"
    write_whole(path, run_page(run))
    return path


def run_page(run: RunFiles) -> str:
    """The report as HTML."""
    used, access = uses(run), access_by_node(run)
    sections = [
        ("learning", "Learning curves", curves(run)),
        ("nodes", "Node by node", node_spread(run)),
        ("predicted", "Predicted beside measured", predicted(run, access)),
        ("slow", "Why was it slow?", why_slow(run, used, link_uses(run, access))),
        ("timeline", "Timeline", timeline(run)),
        ("fleet", "Fleet", fleet(run, used, access)),
        ("data", "Data", partition(run)),
        ("updates", "Updates", updates(run)),
        ("traffic", "Traffic", traffic(run)),
        ("events", "Events", events(run)),
        ("experiment", "Experiment", _experiment(run)),
    ]
    return page(f"{_title(run)} · edgefl", _header(run), sections)


def _title(run: RunFiles) -> str:
    method = run.summary.get("method") or "run"
    nodes = run.summary.get("nodes") or len(run.nodes)
    return f"{method} on {nodes} nodes" if nodes else str(method)


def status(run: RunFiles) -> tuple[str, str]:
    """(status, reason) as the run folder says."""
    s = run.info.get("status") or run.summary.get("status") or "unknown"
    return str(s), str(run.info.get("reason") or run.summary.get("reason") or "")


def _header(run: RunFiles) -> Markup:
    word, reason = status(run)
    name = run.experiment.get("name")
    over = [str(name)] if name else []
    over += [f"runtime {run.summary['runtime']}"] if run.summary.get("runtime") else []
    over += [f"seed {run.summary['seed']}"] if run.summary.get("seed") is not None else []
    pill = element("span", word, f"pill {TONES.get(word, 'warn')}")
    return join(
        (
            element("p", " · ".join(["edgefl", *over]), "eyebrow"),
            element("h1", join((_title(run), pill))),
            paragraph(_lead(run, word, reason), "lead"),
            cards(_key_figures(run)),
        )
    )


def _lead(run: RunFiles, word: str, reason: str) -> str:
    """The run in two sentences."""
    clock = "virtual time" if run.summary.get("runtime") == "virtual" else "wall time"
    told = f"{word.capitalize()} after {seconds(run.time_s)} of {clock}"
    told += f": {reason.rstrip('.')}. " if reason and reason != word else ". "
    name, final, target = metric_name(run), _final(run), target_value(run)
    reached = as_float(run.summary.get("time_to_target_s"))
    if target is not None and reached is not None:
        told += f"It reached {name} {plain(target)} after {seconds(reached)}"
        told += f" and ended at {number(final)}." if final is not None else "."
    elif target is not None:
        told += f"It did not reach {name} {plain(target)}"
        told += f"; it ended at {number(final)}." if final is not None else "."
    elif final is not None:
        told += f"It ended at {name} {number(final)}."
    return told


def _final(run: RunFiles) -> float | None:
    for key in ("final_accuracy", "final_metric"):
        if (found := as_float(run.summary.get(key))) is not None:
            return found
    return run.curve[-1].value if run.curve else None


def _key_figures(run: RunFiles) -> list[tuple[object, object, object]]:
    s, name = run.summary, metric_name(run)
    number_of = {key: as_float(s.get(key)) for key in s}
    spread: dict[str, Any] = s["spread"] if isinstance(s.get("spread"), dict) else {}
    target = target_value(run)
    busy, idle = number_of.get("busy_s") or 0.0, number_of.get("idle_s") or 0.0
    found: list[tuple[object, object, object]] = []
    if target is not None:
        remark = f"{name} {plain(target)}"
        reached = number_of.get("time_to_target_s")
        found.append(("Time to target", "missed" if reached is None else seconds(reached), remark))
    loss = number_of.get("final_loss")
    found.append((f"Final {name}", number(_final(run)), "" if loss is None else f"loss {number(loss)}"))
    if has_spread(run) and as_float(spread.get("worst_tenth")) is not None:
        best = number(as_float(spread.get("best")))
        found.append(("Worst tenth of nodes", number(as_float(spread["worst_tenth"])), f"best node {best}"))
    wire = f"{scaled(number_of.get('wire_bytes'), 'B')} on the wire (modelled)"
    found.append(("Payload sent", scaled(number_of.get("payload_bytes"), "B"), wire))
    found.append(("Messages", number(number_of.get("messages")), "sent by all nodes"))
    energy = run.summary.get("energy") or "modelled"
    found.append(("Energy", scaled(number_of.get("joules"), "J"), f"{energy}, all nodes"))
    if busy + idle > 0:
        remark = f"{seconds(busy)} busy, {seconds(idle)} idle"
        found.append(("Processors busy", share(busy, busy + idle), f"device time: {remark}"))
    found.append(("Time of the run", seconds(run.time_s), f"{seconds(number_of.get('wall_s'))} of wall time"))
    return found


def _experiment(run: RunFiles) -> Markup:
    parts = []
    if run.experiment_text:
        parts.append(folded("The resolved experiment file: running it again repeats the run",
                            element("pre", run.experiment_text)))  # fmt: skip
    if run.info.get("error"):
        parts.append(folded("The error as it was raised", element("pre", run.info["error"])))
    rows = [
        (key, value)
        for key, value in flat(run.info).items()
        if key not in ("reason", "error") and value is not None
    ]
    made = [(key, value) for key, value in rows if not key.startswith("summary.")]
    parts.append(folded("Versions and machine", table(("what", "value"), made, 2)))
    summary = [(key.removeprefix("summary."), value) for key, value in rows if key.startswith("summary.")]
    parts.append(
        folded(
            "Summary, as run.json has it (times in s, energy in J, sizes in B)",
            table(("what", "value"), summary, 2),
        )
    )
    return join(parts)
