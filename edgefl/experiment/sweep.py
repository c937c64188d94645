"""One experiment at every point of a grid of settings, over seeds, in parallel processes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError
from edgefl.experiment.batch import BatchProgress, Job
from edgefl.experiment.build import build
from edgefl.experiment.compare import run_comparison, with_seeds
from edgefl.experiment.comparison import Comparison
from edgefl.experiment.config import Experiment, load_experiment


def sweep(
    experiment: str | Path | Mapping[str, Any],
    grid: Mapping[str, Sequence[object]],
    seeds: Sequence[int] = (),
    jobs: int | None = None,
    out: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    method: str | None = None,
    progress: BatchProgress | None = None,
) -> Comparison:
    """Run the experiment at every point of the grid with each seed; otherwise as `compare`.

    grid: values by dotted key, e.g. {"train.learning_rate": [0.01, 0.1]}; a string is written as on the
    command line. A point is the variant of its runs, written "learning_rate=0.01" (the key's last word).
    """
    named = isinstance(grid, Mapping)
    if not named or not grid or not all(_listed(values) for values in grid.values()):
        raise ConfigError("--grid", grid, "at least one key with a list of at least one value")
    axes = [[(key, _text(value)) for value in values] for key, values in grid.items()]
    planned = []
    for point in itertools.product(*axes):
        settings = [*overrides, *(f"{key}={value}" for key, value in point)]
        first = load_experiment(experiment, settings, smoke=smoke, method=method)
        build(first)  # what cannot be is refused here, before anything starts
        planned += [_job(point, one) for one in with_seeds(first, seeds)]
    return run_comparison("sweep", planned, jobs, out, progress)


def _listed(values: object) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0


def _text(value: object) -> str:
    """A value as an override writes it; numpy's scalars as Python's."""
    if isinstance(value, str):
        return value
    return json.dumps(value.item() if hasattr(value, "item") else value)


def _job(point: Sequence[tuple[str, str]], experiment: Experiment) -> Job:
    words = [key.rpartition(".")[2] for key, _ in point]
    names = words if len(set(words)) == len(words) else [key for key, _ in point]
    variant = ",".join(f"{name}={value}" for name, (_, value) in zip(names, point, strict=True))
    label = re.sub(r"[^\w.=,+-]+", "-", f"{variant}-{experiment.seed}")
    return Job(label, variant, experiment.seed, experiment)


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """A grid from the command line's "KEY=A,B" texts. Raises ConfigError."""
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not key.strip() or "" in split_values(values):
            raise ConfigError("--grid", text, "KEY=VALUE,VALUE, such as train.learning_rate=0.01,0.1")
        if key.strip() in grid:
            raise ConfigError("--grid", text, f"{key.strip()} once, with all its values")
        grid[key.strip()] = split_values(values)
    return grid


def split_values(text: str) -> list[str]:
    """Split at the commas that stand outside brackets and quotes.

    >>> split_values('0.01,[1, 2],"a,b"')
    ['0.01', '[1, 2]', '"a,b"']
    """
    found, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += letter
    return [value.strip() for value in found]
