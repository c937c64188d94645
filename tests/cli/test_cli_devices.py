import json
import subprocess
import sys

import pytest

FILE = """
method = "fedavg"
[fleet]
devices = { raspberry-pi-4b = 2, laptop = 1 }
[data]
num_train = 200
num_test = 50
[train]
local_steps = 3
[stop]
rounds = 3
"""


def edgefl(*arguments, cwd):
    command = [sys.executable, "-m", "edgefl.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "e.toml"
    path.write_text(FILE)
    return path


def test_plan_shows_a_table_and_a_timeline_and_runs_nothing(file, tmp_path):
    done = edgefl("plan", file, "--set", "assign.policy=deadline", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fedavg, deadline:" in done.stdout and "# computes, = sends, . neither" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_plan_for_machines(file, tmp_path):
    done = edgefl("plan", file, "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["rounds"] == 3 and len(found["nodes"]) == 4
    assert found["round_s"] == pytest.approx(found["time_s"] / 3, rel=0.05)


def test_plan_refuses_what_build_refuses(file, tmp_path):
    done = edgefl("plan", file, "--set", "fleet.devices={raspbery-pi-4b=2}", cwd=tmp_path)
    assert done.returncode == 2 and "did you mean 'raspberry-pi-4b'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("out", ["mine.yaml", "nowhere/mine.toml"])
def test_profile_refuses_where_it_cannot_write_before_it_measures(tmp_path, out):
    done = edgefl("profile", "--out", out, cwd=tmp_path)
    assert done.returncode == 2 and "--out = " in done.stderr


@pytest.mark.slow
def test_profile_in_a_minute(tmp_path):
    done = edgefl("profile", "--out", "mine.toml", "--model", "cnn", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["machine"]["measured_s"] <= 60 and "cnn/8234" in found["step_times_s"]
    (tmp_path / "e.toml").write_text(FILE.replace("raspberry-pi-4b", '"mine.toml"'))
    assert edgefl("plan", "e.toml", cwd=tmp_path).returncode == 0
