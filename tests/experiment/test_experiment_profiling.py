import json
import os

import pytest
import torch

from edgefl.devices import device
from edgefl.errors import ConfigError
from edgefl.experiment import profiling
from edgefl.experiment.build import build
from edgefl.experiment.config import load_experiment
from edgefl.experiment.energy import sampled, word
from edgefl.experiment.profiling import measure_machine, profiled_model, write_profile
from edgefl.learning.measuring import block_times, stage_sample, step_times


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """This machine, measured with next to no time for each figure."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "measure", lambda call, budget_s: original(call, 0.0, 2))
        patch.setattr(profiling, "fitted_kernels", lambda times, budget_s: fitted(times, 0.01))
        folder = tmp_path_factory.mktemp("profile")
        found = measure_machine(quick=True, told=lambda what, share: told.append(share), folder=folder)
    assert told == sorted(told) and told[-1] == 1.0
    return found


original, fitted = profiling.measure, profiling.fitted_kernels


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_a_profile_reads_back_as_a_device(profile, tmp_path, ending):
    path = tmp_path / f"mine.{ending}"
    write_profile(profile, path)
    read = device(path)
    assert read.kernels == profile.kernels and read.compute_flops == profile.compute_flops
    assert read.name == ("mine" if ending == "toml" else profile.name)
    if ending == "json":
        assert json.loads(path.read_text())["machine"]["accelerator"] is None or torch.cuda.is_available()


def test_it_says_what_was_measured_and_what_was_not(profile):
    machine = profile.machine
    assert machine["cores_allowed"] >= 1 and machine["threads"] == 1
    assert machine["bandwidth_bytes_per_s"] == profile.memory_bytes_per_s
    nothing = {key for key, value in machine.items() if value is None}
    assert nothing - {"power_source", "load_before", "load_after"} <= set(machine["not_offered"])
    assert 0 <= machine["spread"]["median"] <= machine["spread"]["worst"]


def test_a_busy_machine_is_not_trusted(profile):
    facts = profiling.Facts(dict(profile.machine))
    quiet = {**profile.machine, "load_before": 0.0, "spread": {"median": 0.01}, "throttled": None}
    assert profiling._doubts(quiet, facts) == []
    cores = quiet["cores_allowed"]
    assert "the machine was busy" in profiling._doubts({**quiet, "load_before": 2.0 * cores}, facts)[0]
    assert "repeats differ" in profiling._doubts({**quiet, "spread": {"median": 0.5}}, facts)[0]
    assert "throttled" in profiling._doubts({**quiet, "throttled": True}, facts)[0]


def test_a_measured_device_runs_in_an_experiment(profile, tmp_path):
    write_profile(profile, tmp_path / "mine.toml")
    file = tmp_path / "e.toml"
    file.write_text(
        'method = "fedavg"\n[fleet]\ndevices = { "mine.toml" = 2 }\n[data]\nnum_train = 100\nnum_test = 20\n'
        "[stop]\nrounds = 1\n"
    )
    built = build(load_experiment(file))
    step = built.fleet.compute_s(1, built.plan.nodes[1].workload)
    assert 1e-5 < step < 1.0


def test_steps_and_blocks_of_a_model_by_name():
    model = profiled_model("cnn")
    times = step_times(model, (4, 16), 0.02)
    assert set(times) == {4, 16} and all(0 < s.seconds < 1 for s in times.values())
    blocks = block_times(model, 4, 0.04)
    assert list(blocks) == list(model.blocks) and all(0 < t < 1 for t in blocks.values())
    assert stage_sample(model.stage(1, 3), 4, 0.01).seconds > 0
    assert set(block_times(profiled_model("linear"), 4, 0.01)) == {"output"}


def test_an_unknown_model_is_refused():
    with pytest.raises(ConfigError, match=r"model\.name = 'cnnn': did you mean 'cnn'"):
        profiled_model("cnnn")


def test_another_ending_is_refused(profile, tmp_path):
    with pytest.raises(ConfigError, match=r"ends with \.toml or \.json"):
        write_profile(profile, tmp_path / "mine.yaml")


def test_a_meter_is_looked_at_while_something_goes_on():
    class Meter:
        name, covers, reason, joules = "x", "board", None, None

        def __init__(self):
            self.times = []

        def sample(self, time_s):
            self.times.append(time_s)

    meter = Meter()
    with sampled(meter, every_s=0.01):
        while len(meter.times) < 4:
            os.sched_yield()
    taken = len(meter.times)
    assert taken >= 5 and meter.times == sorted(meter.times)
    assert word(["measured", None]) == "measured" and word([]) is None


def test_the_table_shows_the_steps_and_blocks_of_a_model(profile):
    machine = {**profile.machine, "block_times_s": {"hidden": 2e-4, "output": 1e-4}}
    timed = profile.model_copy(update={"machine": machine, "step_times_s": {"mlp/10": {4: 1e-3}}})
    rows = dict(profiling.table_rows(timed))
    assert rows["step of mlp/10, batch 4"] == "1 ms" and rows["block hidden, batch 16"] == "200 µs"
