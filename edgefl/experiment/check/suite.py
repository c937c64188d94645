"""The fault laboratory: one method under many schedules, and the first that it does not outlive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from edgefl.errors import ConfigError
from edgefl.experiment.build import Built, build
from edgefl.experiment.check.schedule import Schedule, draw
from edgefl.experiment.check.trial import Bound, Verdict, bound_of, run_trial
from edgefl.experiment.config import Experiment, load_experiment
from edgefl.experiment.tables import Stop
from edgefl.experiment.threads import one_thread

ROUNDS = 5
"""Rounds of a check where no file says another number."""
_FIRST_BOUND = Bound(time_s=1e6, events=2_000_000)


@dataclass(frozen=True)
class Trial:
    """One schedule and how the run under it ended."""

    schedule: Schedule
    verdict: Verdict


@dataclass(frozen=True)
class Finding:
    """A failure: as it was met, and the shortest schedule found under which the run ends the same way."""

    trial: Trial
    shortest: Trial
    replay: str
    """The command that meets it again."""


class Laboratory:
    """A method on a small fleet, and how its run goes undisturbed."""

    def __init__(self, target: str, overrides: Sequence[str] = (), *, smoke: bool = False) -> None:
        """target: a method's name, a .py file that defines METHOD, or an experiment file (.toml).

        Raises ConfigError for what cannot be run.
        """
        self.target, self.overrides, self.smoke = target, tuple(overrides), smoke
        self.built: Built = build(_experiment(target, overrides, smoke))
        self.plan = self.built.plan
        with one_thread():
            self.undisturbed = run_trial(self.plan, self.built.executor, Schedule(0), _FIRST_BOUND)

    def schedule(self, seed: int) -> Schedule:
        """The schedule of a seed."""
        return draw(seed, self.plan, self.plan.method.tolerates, self.undisturbed.time_s)

    def trial(self, schedule: Schedule) -> Trial:
        """Run once under a schedule."""
        bound = bound_of(self.undisturbed, schedule)
        with one_thread():
            return Trial(schedule, run_trial(self.plan, self.built.executor, schedule, bound))

    def trials(self, seeds: Iterable[int]) -> Iterator[Trial]:
        """One run per seed, in order; the caller stops where it has seen enough."""
        for seed in seeds:
            yield self.trial(self.schedule(seed))

    def finding(self, trial: Trial, shrinking: Callable[[], None] = lambda: None) -> Finding:
        """A failed trial, explained. shrinking: called for each run that is made to that end."""
        shortest = trial
        index = 0
        while index < len(shortest.schedule.faults):
            shrinking()
            shorter = self.trial(shortest.schedule.without(index))
            if shorter.verdict.kind == trial.verdict.kind:
                shortest, index = shorter, 0
            else:
                index += 1
        return Finding(trial, shortest, self.command(trial.schedule.seed))

    def as_dict(self, trial: Trial) -> dict[str, Any]:
        """A trial for machines."""
        verdict = trial.verdict
        return {
            "method": self.plan.method.name,
            "seed": trial.schedule.seed,
            "verdict": verdict.kind,
            "detail": verdict.detail,
            "time_s": verdict.time_s,
            "faults": trial.schedule.describe(self.plan),
        }

    def command(self, seed: int) -> str:
        """What to type to meet a seed again."""
        words = ["edgefl check", self.target, f"--seed {seed}", *(f"--set {text}" for text in self.overrides)]
        return " ".join([*words, "--smoke"] if self.smoke else words)


class Progress(Protocol):
    """Shows how far a check is."""

    def begin(self, method: str, total: int) -> None: ...
    def checked(self, trial: Trial) -> None: ...
    def shrinking(self) -> None:
        """A run is made to explain a failure."""
        ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class Report:
    """What a check has come to. tolerated: the kinds of faults that were drawn. finding: None: no failure."""

    method: str
    tolerated: tuple[str, ...]
    trials: tuple[Trial, ...]
    finding: Finding | None


def check(laboratory: Laboratory, seeds: Iterable[int], progress: Progress | None = None) -> Report:
    """Run under the schedule of each seed, up to the first failure, which is explained.

    A run that fails undisturbed is the finding, whatever the seeds are.
    """
    seeds = list(seeds)
    if progress is not None:
        progress.begin(laboratory.plan.method.name, len(seeds))
    trials: list[Trial] = []
    finding: Finding | None = None
    try:
        alone = Trial(Schedule(0), laboratory.undisturbed)
        for trial in laboratory.trials(seeds) if alone.verdict.good else (alone,):
            trials.append(trial)
            if progress is not None:
                progress.checked(trial)
            if not trial.verdict.good:
                shrinking = progress.shrinking if progress is not None else lambda: None
                finding = laboratory.finding(trial, shrinking)
                break
    finally:
        if progress is not None:
            progress.end()
    tolerates = laboratory.plan.method.tolerates
    tolerated = tuple(f.name for f in fields(tolerates) if getattr(tolerates, f.name))
    return Report(laboratory.plan.method.name, tolerated, tuple(trials), finding)


def _experiment(target: str, overrides: Sequence[str], smoke: bool) -> Experiment:
    """What is run: the file's experiment up to a number of rounds, or a small one around a method."""
    if target.endswith(".toml"):
        experiment = load_experiment(Path(target), overrides, smoke=smoke)
    elif smoke:
        raise ConfigError("--smoke", True, "it goes with an experiment file")
    else:
        small = Path(str(files("edgefl.experiment.check").joinpath("small.toml")))
        experiment = load_experiment(small, overrides, method=target)
    stop = Stop(rounds=experiment.stop.rounds or ROUNDS)
    return experiment.model_copy(update={"stop": stop})
