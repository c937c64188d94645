"""edgefl.run and edgefl.check: these commands from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError
from edgefl.experiment.check import Laboratory, Report
from edgefl.experiment.check import check as check_under_faults
from edgefl.experiment.config import Experiment, load_experiment
from edgefl.experiment.progress import Progress
from edgefl.experiment.results import Run, load
from edgefl.experiment.runner import run_experiment
from edgefl.experiment.toml import literal


def run(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    *,
    method: str | None = None,
    seed: int | None = None,
    smoke: bool = False,
    runtime: str = "virtual",
    out: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Run:
    """Run an experiment file, its tables as a dictionary, or an Experiment, and return its results.

    settings: other keys of the file, with two underscores for a dot: train__learning_rate=0.05.
    Raises ConfigError and RunError as run_experiment does.
    """
    overrides = _overrides(settings)
    if isinstance(experiment, Experiment):
        if overrides or smoke or method is not None or seed is not None:
            raise ConfigError(
                "experiment", experiment.name, "settings are changed where a file or its tables are given"
            )
        chosen = experiment
    else:
        chosen = load_experiment(experiment, overrides, smoke=smoke, seed=seed, method=method)
    folder = None if out is None else Path(out)
    return load(run_experiment(chosen, runtime=runtime, out=folder, progress=progress).folder)


def check(
    target: str | Path, num_seeds: int = 200, *, seed: int | None = None, smoke: bool = False, **settings: Any
) -> Report:
    """Run a method under the fault schedules of the seeds 0 to num_seeds - 1, or of one, up to a failure.

    target: a method's name, a .py file that defines METHOD, or an experiment file. settings: as in run.
    Raises ConfigError for what cannot be run.
    """
    laboratory = Laboratory(str(target), _overrides(settings), smoke=smoke)
    return check_under_faults(laboratory, range(num_seeds) if seed is None else [seed])


def _overrides(settings: dict[str, Any]) -> list[str]:
    overrides = []
    for key, value in settings.items():
        name = key.replace("__", ".")
        try:
            overrides.append(f"{name}={literal(value)}")
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                name, value, "a text, a number, a truth value, a list or a dictionary"
            ) from error
    return overrides
