"""Every method, under schedules of the faults that it says it outlives: it ends, and its invariants hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from scattered import KEEP_THE_MEAN, STAY_WITHIN, STILL, write_scattered

from edgefl.errors import ConfigError
from edgefl.experiment.check import Laboratory, check
from edgefl.nodes.registry import methods

PAPERS = Path(__file__).resolve().parents[2] / "experiments" / "papers"


SETTINGS = {name: [f"method.{name}.plan=common"] for name in ("hsfl", "hsfl-layerwise")}
"""Where a method's own planner takes longer than its run."""
MOST_EVENTS = 20_000
"""Of all runs of one method in the quick suite, about: who makes many has fewer schedules, three at least."""


def laboratory(name: str) -> Laboratory:
    """The method on the small fleet of `edgefl check`, or where it cannot run there, on its paper's file."""
    try:
        return Laboratory(name, SETTINGS.get(name, ()))
    except ConfigError:
        return Laboratory(str(PAPERS / f"{name}.toml"), smoke=True)


def assert_outlived(made: Laboratory, num_seeds: int) -> None:
    found = check(made, range(num_seeds))
    if found.finding is not None:
        shortest = found.finding.shortest
        faults = "\n".join(shortest.schedule.describe(made.plan))
        pytest.fail(f"{shortest.verdict.kind}: {shortest.verdict.detail}\n{faults}\n{found.finding.replay}")
    assert len(found.trials) == num_seeds


@pytest.mark.parametrize("name", methods())
def test_ten_schedules(name):
    made = laboratory(name)
    assert_outlived(made, min(10, max(3, MOST_EVENTS // made.undisturbed.events)))


@pytest.mark.slow
@pytest.mark.parametrize("name", methods())
def test_two_hundred_schedules(name):
    assert_outlived(laboratory(name), 200)


def scattered(folder: Path, name: str) -> Laboratory:
    """The method's averaging alone, from models that differ, with what it must keep as an invariant."""
    return Laboratory(write_scattered(folder, name), [STILL])


@pytest.mark.parametrize("name", [*KEEP_THE_MEAN, *STAY_WITHIN])
def test_averaging_keeps_what_it_should_under_five_schedules(tmp_path, name):
    assert_outlived(scattered(tmp_path, name), 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KEEP_THE_MEAN, *STAY_WITHIN])
def test_averaging_keeps_what_it_should_under_two_hundred_schedules(tmp_path, name):
    assert_outlived(scattered(tmp_path, name), 200)
