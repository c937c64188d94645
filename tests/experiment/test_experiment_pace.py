"""How long a round takes is said alike of every run, by when each node reached its last step."""

from __future__ import annotations

import pytest
from experiment_files import SMALL

from edgefl.experiment.build import build
from edgefl.experiment.config import load_experiment
from edgefl.experiment.observer import RunObserver
from edgefl.experiment.pace import mean_round_s, reached
from edgefl.experiment.runner import run_experiment
from edgefl.runtimes.virtual import VirtualRuntime


def test_a_step_that_is_published_again_was_reached_when_it_was_first():
    paces = {}
    for time_s, step in ((0.0, 0), (2.0, 1), (3.0, 1), (5.0, 2), (6.0, 1), (9.0, 2)):
        reached(paces, 7, time_s, step)
    assert paces == {7: (5.0, 2)}


class Steps(RunObserver):
    """Keeps when each node first published each step."""

    def published(self, node, time_s, step, parameters, part):
        self.first = getattr(self, "first", {})
        self.first.setdefault((node, step), time_s)
        return super().published(node, time_s, step, parameters, part)


@pytest.mark.parametrize("method", ["fedavg", "d-psgd", "ad-psgd", "dapple", "splitfed-v1"])
def test_a_runs_round_is_that_of_its_nodes_or_of_its_slowest_part(tmp_path, method):
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    sets = ["stop.rounds=5", "faults.compute_jitter=0.2", "fleet.stragglers={share=0.25, slowdown=3}"]
    experiment = load_experiment(file, sets, method=method)
    summary = run_experiment(experiment, out=tmp_path / "run", keep_events=False).summary
    built = build(experiment)
    steps = Steps(built)
    VirtualRuntime(built.plan, steps, built.executor).run()
    each = [time_s / 5 for (_, step), time_s in steps.first.items() if step == 5]
    expected = max(each) if method == "dapple" else sum(each) / len(each)
    assert summary["rounds"] == 5 and summary["round_s"] == pytest.approx(expected, rel=1e-12)
    if method == "fedavg":
        assert summary["round_s"] == pytest.approx(summary["time_s"] / 5)
    if method == "ad-psgd":  # nobody waits: the slowest makes the run's end
        assert summary["round_s"] < 0.9 * summary["time_s"] / 5


def test_a_part_that_is_late_makes_the_round():
    assert mean_round_s({0: (4.0, 2), 3: (5.0, 2)}, "parts") == 2.5
    assert mean_round_s({0: (4.0, 2), 3: (5.0, 2)}, "each") == 2.25
