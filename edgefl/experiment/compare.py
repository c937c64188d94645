"""Methods side by side on one experiment, over seeds, in parallel processes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError
from edgefl.experiment.batch import BatchProgress, Job, Result, done_before, processors, run_jobs
from edgefl.experiment.build import build
from edgefl.experiment.comparison import FILE, Comparison
from edgefl.experiment.config import Experiment, load_experiment
from edgefl.experiment.folder import alone


def compare(
    experiment: str | Path | Mapping[str, Any],
    methods: Sequence[str],
    seeds: Sequence[int] = (),
    jobs: int | None = None,
    out: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    smoke: bool = False,
    progress: BatchProgress | None = None,
) -> Comparison:
    """Run each method with each seed on the same experiment; returns how they did beside each other.

    experiment: a file's path, or its tables as a dictionary.
    methods: names or .py files. seeds: default, the file's own. jobs: processes at a time, default one per
    processor. out: the folder of the comparison, default runs/DATE-NAME-compare; when it holds one already,
    finished runs of it are kept and the rest is done. A run that fails is in `failures`, the others go on.
    Raises ConfigError before anything starts, and KeyboardInterrupt after interrupting what runs.
    """
    if isinstance(methods, str):
        methods = [methods]
    if not methods:
        raise ConfigError("--methods", "", "at least one method")
    planned = []
    for name in methods:
        first = load_experiment(experiment, overrides, smoke=smoke, method=name)
        build(first)  # what cannot be is refused here, before anything starts
        variant = first.method.method.name
        for one in with_seeds(first, seeds):
            planned.append(Job(f"{variant}-{one.seed}", variant, one.seed, one))
    return run_comparison("compare", planned, jobs, out, progress)


def with_seeds(experiment: Experiment, seeds: Sequence[int]) -> list[Experiment]:
    """The experiment with each of the seeds, or as it is when there are none. Raises ConfigError."""
    wrong = next((seed for seed in seeds if not isinstance(seed, Integral) or not 0 <= seed < 2**63), None)
    if wrong is not None:
        raise ConfigError("--seeds", wrong, "whole numbers from 0 on")
    return [experiment.model_copy(update={"seed": seed}) for seed in seeds] or [experiment]


def run_comparison(
    kind: str,
    jobs: Sequence[Job],
    at_once: int | None,
    out: str | Path | None,
    progress: BatchProgress | None,
) -> Comparison:
    """Run the jobs of a comparison or a sweep into its folder, with tables and report; see `compare`."""
    if at_once is not None and (not isinstance(at_once, int) or at_once < 1):
        raise ConfigError("--jobs", at_once, "at least 1")
    labels = [job.label for job in jobs]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(
            "--methods" if kind == "compare" else "--grid", twice, "each method, grid point and seed once"
        )
    folder = Path(out) if out is not None else _new_folder(jobs[0].experiment.name, kind)
    if folder.exists() and not (folder / FILE).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("--out", str(folder), "a new folder, or one of an earlier comparison to go on with")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", str(folder), f"a folder that can be made ({error.strerror})") from error
    with alone(folder, "--out"):
        return _run_alone(kind, jobs, at_once, folder, progress)


def _run_alone(
    kind: str, jobs: Sequence[Job], at_once: int | None, folder: Path, progress: BatchProgress | None
) -> Comparison:
    done = done_before(jobs, folder)
    # Written before the runs too: after an interruption the same command goes on with this folder.
    planned = [done.get(job.label) or Result(job.label, job.variant, job.seed) for job in jobs]
    Comparison(folder, kind, tuple(planned)).write()
    try:
        results = run_jobs(jobs, folder, done, workers=at_once or processors(), progress=progress)
    except KeyboardInterrupt as error:
        error.add_note(f"the same command with --out {folder} goes on")
        raise
    comparison = Comparison(folder, kind, tuple(results))
    comparison.write()
    if comparison.summaries:
        comparison.write_report()
    return comparison


def _new_folder(name: str, kind: str) -> Path:
    """runs/DATE-NAME-KIND, with -2, -3, ... when it is taken."""
    words = re.sub(r"[^\w.-]+", "-", f"{time.strftime('%Y-%m-%d')}-{name}-{kind}")
    folder, count = Path("runs", words), 1
    while folder.exists():
        count += 1
        folder = Path("runs", f"{words}-{count}")
    return folder
