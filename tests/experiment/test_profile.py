"""The profile of the testbed's own time: its kinds add up, and it changes nothing in the run."""

import json

import pytest
from experiment_files import small_file

from edgefl.errors import ConfigError
from edgefl.experiment.config import load_experiment
from edgefl.experiment.profile import FILE, KINDS, Stopwatch, in_words
from edgefl.experiment.runner import run_experiment


def test_a_profiled_run_is_the_same_run_and_says_where_its_time_went(tmp_path):
    experiment = load_experiment(small_file(tmp_path))
    plain = run_experiment(experiment, out=tmp_path / "plain")
    found = run_experiment(experiment, out=tmp_path / "profiled", profiled=True)
    for table in ("metrics.csv", "spans.csv", "evaluations.csv"):
        assert (found.folder / table).read_bytes() == (plain.folder / table).read_bytes()
    assert not (plain.folder / FILE).exists()
    profile = json.loads((found.folder / FILE).read_text())
    assert set(profile["seconds"]) == set(KINDS)
    assert sum(profile["seconds"].values()) == pytest.approx(profile["wall_s"])
    assert all(profile["calls"][kind] > 0 for kind in KINDS if kind != "events")
    assert profile["seconds"]["training"] > 0 and profile["num_messages"] == 4 * 4 * 2
    assert 0 < profile["testbed_share"] < 1


def test_time_within_another_kind_is_taken_from_it(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    watch = Stopwatch()
    inner = watch.around("training", lambda: None)
    watch.around("programs", inner)()
    watch.switch("events")
    assert watch.seconds["events"] == 1.0 + 16.0
    assert watch.seconds["programs"] == 2.0 + 8.0
    assert watch.seconds["training"] == 4.0


def test_checkpoints_and_a_profile_are_refused_together(tmp_path):
    experiment = load_experiment(small_file(tmp_path), ["execution.checkpoint_s=1"])
    with pytest.raises(ConfigError, match="profile-run"):
        run_experiment(experiment, out=tmp_path / "out", profiled=True)


def test_in_words_the_largest_share_stands_first():
    text = in_words({"wall_s": 2.0, "share": {"events": 0.25, "training": 0.75}})
    assert text == "wall time 2.00 s: training 75%, events 25%"
