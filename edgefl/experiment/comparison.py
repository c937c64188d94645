"""What several runs say beside each other: means over seeds with intervals, ranks, files, data frames."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgefl.errors import ConfigError
from edgefl.experiment.batch import DONE, Result, read_run
from edgefl.experiment.statistics import mean_interval, ranks
from edgefl.experiment.tables import RISING
from edgefl.whole import write_whole

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
FILE = "comparison.json"
MEANS = (
    "time_to_target_s", "final_accuracy", "final_metric", "final_loss", "worst_tenth", "time_s",
    "payload_bytes", "wire_bytes", "busy_s", "idle_s", "joules",
)  # fmt: skip
"""What a table gives as a mean with its 95 % interval over seeds."""


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison or a sweep, as they ended, in the order asked for.

    folder: where the runs, the tables and the report lie. kind: "compare" or "sweep".
    """

    folder: Path
    kind: str
    results: tuple[Result, ...]

    @property
    def lines(self) -> list[dict[str, Any]]:
        """One JSON-able object per run: its summary, or status "failed" with the reason."""
        return [
            {"label": r.label, "variant": r.variant, "seed": r.seed}
            | dict(
                r.summary if r.summary is not None else {"status": "failed", "reason": r.reason or "not run"}
            )
            for r in self.results
        ]

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """The lines of the runs that have a summary."""
        return [line for line in self.lines if line["status"] != "failed"]

    @property
    def failures(self) -> dict[str, str]:
        """Why each of the other runs has no summary, by label."""
        return {line["label"]: line["reason"] for line in self.lines if line["status"] == "failed"}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per variant (`summarize`)."""
        return summarize(self.results)

    @property
    def table(self) -> pd.DataFrame:
        """`rows` as a data frame, one row per variant."""
        return _frame(self.rows).set_index("variant")

    @property
    def runs(self) -> pd.DataFrame:
        """`summaries` as a data frame, one row per run; nested values flat (`spread.best`)."""
        return _frame([flat(summary) for summary in self.summaries])

    @property
    def report(self) -> Path:
        """Where the report lies once it is written."""
        return self.folder / "comparison.html"

    def write(self) -> None:
        """Write comparison.json, runs.csv (a row per run) and table.csv (a row per variant), whole."""
        runs = [
            {"label": r.label, "variant": r.variant, "seed": r.seed, "reason": r.reason} for r in self.results
        ]
        text = json.dumps({"schema": SCHEMA, "kind": self.kind, "runs": runs}, indent=1)
        write_whole(self.folder / FILE, text + "\n")
        _write_csv(self.folder / "runs.csv", [flat(summary) for summary in self.summaries])
        _write_csv(self.folder / "table.csv", self.rows)

    def write_report(self) -> Path:
        """Write the runs' common report; returns its path."""
        from edgefl.experiment.report import write_comparison

        folders = [self.folder / r.label for r in self.results if r.summary is not None]
        return write_comparison(folders, self.report)


def load_comparison(folder: Path) -> Comparison:
    """A comparison from its folder, with what its runs say now.

    Raises ConfigError when the folder holds none.
    """
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        listed = [(r["label"], r["variant"], r["seed"], r["reason"]) for r in found["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("folder", str(folder), f"the folder of a comparison ({error})") from error
    results = [
        Result(label, variant, seed, *_outcome(folder / label, reason))
        for label, variant, seed, reason in listed
    ]
    return Comparison(folder, found["kind"], tuple(results))


def _outcome(folder: Path, reason: str | None) -> tuple[Mapping[str, Any] | None, str | None]:
    run = read_run(folder)
    if run is None:
        return None, reason
    return (run["summary"], None) if run.get("status") in DONE else (None, run.get("reason") or reason)


def summarize(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row per variant, in order of appearance.

    variant; runs and failed: counts; reached: how many runs reached the target; for each of MEANS the mean
    over the runs that have the figure, and under KEY_ci95 half the width of its 95 % interval (t
    distribution; None below two values); rank: the mean over seeds of the place among the variants. So
    time_to_target_s is a mean over `reached` runs only: read the two together.
    """
    places = _places(results)
    rows = []
    for variant in dict.fromkeys(r.variant for r in results):
        own = [r for r in results if r.variant == variant]
        summaries = [r.summary for r in own if r.summary is not None]
        row: dict[str, Any] = {"variant": variant, "runs": len(own), "failed": len(own) - len(summaries)}
        row["reached"] = sum(s.get("time_to_target_s") is not None for s in summaries)
        for key in MEANS:
            row[key], row[f"{key}_ci95"] = mean_interval(_values(summaries, key))
        row["rank"] = mean_interval([places[r.label] for r in own])[0]
        rows.append(row)
    return rows


def _values(summaries: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    found = [
        s["spread"].get(key) if key == "worst_tenth" and s.get("spread") else s.get(key) for s in summaries
    ]
    return [float(v) for v in found if isinstance(v, (int, float)) and math.isfinite(v)]


def _places(results: Sequence[Result]) -> dict[str, float]:
    """The rank of each run among those of its seed, by label: see `_merit`."""
    places: dict[str, float] = {}
    for seed in dict.fromkeys(r.seed for r in results):
        own = [r for r in results if r.seed == seed]
        places |= zip((r.label for r in own), ranks([_merit(r.summary) for r in own]), strict=True)
    return places


def _merit(summary: Mapping[str, Any] | None) -> tuple[float, float]:
    """Smaller is better: time to target (missed: last), then the final metric."""
    if summary is None:
        return math.inf, math.inf
    time_s, final = summary.get("time_to_target_s"), summary.get("final_metric")
    if final is not None and summary.get("metric") in RISING:
        final = -final
    return _or_last(time_s), _or_last(final)


def _or_last(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else float(value)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one level, its keys joined by dots.

    >>> flat({"seed": 1, "spread": {"best": 0.9}})
    {'seed': 1, 'spread.best': 0.9}
    """
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("pandas", None, "data frames need it: pip install 'edgefl[report]'") from error
    return pandas.DataFrame(rows)


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())
