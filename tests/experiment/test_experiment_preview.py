import csv

import pytest
from experiment_files import SMALL

from edgefl.errors import ConfigError
from edgefl.experiment.config import load_experiment
from edgefl.experiment.preview import preview
from edgefl.experiment.runner import run_experiment
from edgefl.planview import plan_table, timeline

METHODS = (
    "fedavg", "fedbuff", "d-psgd", "ad-psgd", "ring-allreduce", "splitfed-v1", "fedprox", "edgesplit",
    "dapple", "fjord", "adsp", "ssp",
)  # fmt: skip
# ADSP searches for its commit rate by losses, which a plan does not know: here the rate is given.
SETS = {"fjord": ["assign.policy=width"], "adsp": ["method.adsp.commits_per_period=2"]}
UNEVEN = ["stop.rounds=20", "faults.compute_jitter=0.2", "fleet.stragglers={share=0.25, slowdown=3}"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_predicts_the_rounds_of_the_run(file, tmp_path, method):
    experiment = load_experiment(file, [*UNEVEN, *SETS.get(method, [])], method=method)
    found = preview(experiment)
    run = run_experiment(experiment, out=tmp_path / method, keep_events=False)
    assert found.time_s == pytest.approx(run.summary["time_s"], rel=0.05)
    assert found.round_s == pytest.approx(run.summary["round_s"], rel=0.05)
    assert found.num_rounds == pytest.approx(run.summary["rounds"])


@pytest.mark.slow
def test_hsfl_and_fedcore_too(file, tmp_path):
    """FedCore trains on examples that it chooses by their gradients: as many as it has time for."""
    file.write_text(SMALL.replace("local_steps = 3", "local_epochs = 2"))
    test_a_plan_predicts_the_rounds_of_the_run(file, tmp_path, "fedcore")
    file.write_text(SMALL)
    test_a_plan_predicts_the_rounds_of_the_run(file, tmp_path, "hsfl")


def test_a_deadline_gives_fast_devices_more_steps_in_the_same_round(file):
    uniform = preview(load_experiment(file))
    deadline = preview(load_experiment(file, ["assign.policy=deadline"]))
    assert deadline.round_s <= uniform.round_s * 1.05
    assert deadline.idle < uniform.idle
    steps = {node.device: node.steps for node in deadline.nodes if node.num_examples}
    assert steps["laptop"] > steps["jetson-nano"] >= 3


def test_fjord_trains_at_the_planned_widths(file, tmp_path):
    """Slow devices get narrow corners: fewer bytes, and rounds no longer wait for them."""
    sets = ["stop.rounds=4", "assign.policy=width", "fleet.stragglers={share=0.5, slowdown=4}"]
    experiment = load_experiment(file, sets, method="fjord")
    found = {n.node: n.width for n in preview(experiment).nodes if n.num_examples}
    assert max(found.values()) == 1.0 and min(found.values()) < 1.0
    run_experiment(experiment, out=tmp_path / "run", keep_events=False)
    with (tmp_path / "run" / "nodes.csv").open(newline="") as file:
        sent = {int(row["node"]): int(row["sent_bytes"]) for row in csv.DictReader(file)}
    narrow, wide = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    assert sent[narrow] < 0.8 * sent[wide]


def test_only_methods_that_narrow_take_widths(file):
    with pytest.raises(ConfigError, match="fedavg trains the whole model"):
        preview(load_experiment(file, ["assign.policy=width"]))


def test_what_is_shown(file):
    found = preview(load_experiment(file, ["assign.policy=cluster"]))
    shown = plan_table(found)
    assert shown.row_count == 5 and len(found.groups) == 2
    assert str(shown.title).startswith("fedavg, cluster: ") and " a round over 4 rounds, " in str(shown.title)
    lines = timeline(found)
    assert len(lines) == 6 and all("#" in line for line in lines[2:])
    assert set(found.as_dict()) >= {"round_s", "idle", "nodes", "groups", "spans"}


def test_an_asynchronous_servers_rounds_are_too_short_to_show(file):
    found = preview(load_experiment(file, method="fedasync"))
    slowest_s = max(one.planned_s for one in found.nodes if one.planned_s is not None)
    assert found.shown_s == slowest_s > 2 * found.round_s
    lines = timeline(found)
    assert "a round of the slowest" in lines[0]
    assert all("#" in line for line, one in zip(lines[1:], found.nodes, strict=True) if one.num_examples)


def test_a_large_fleet_has_a_row_per_kind(file):
    found = preview(load_experiment(file, ["fleet.devices={raspberry-pi-4b=40}", "stop.rounds=1"]))
    assert plan_table(found).row_count == 2 and timeline(found)[-1] == "and 9 more"


def test_the_memory_needed_is_refused_before_anything_starts(file):
    small = "compute_flops=1e9\nmemory_bytes_per_s=1e9\nmemory_bytes=1000000\n"
    (file.parent / "small-board.toml").write_text(small)
    sets = ["model.hidden=[500,500]", "fleet.devices={'small-board.toml'=2}"]
    message = r"client 1 \(small-board\) needs 2\.\d MB for mlp/\d+ at batch size 16 and has 1\.0 MB"
    with pytest.raises(ConfigError, match=message):
        preview(load_experiment(file, sets))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("assign.policy=fastest", "assign.policy"),
        ("assign.deadline_s=-1", "assign.deadline_s"),
        ("assign.groups=0", "assign.groups"),
        ("assign.polcy=uniform", "no such key; did you mean 'policy'"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(file, setting, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        load_experiment(file, [setting])
    assert "\n" not in str(refusal.value)
