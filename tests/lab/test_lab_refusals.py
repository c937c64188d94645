"""The lab's commands where there can be no lab: one line, exit code 2, and nothing changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from edgefl.cli import app
from edgefl.lab import build, state, system
from edgefl.lab.layout import layout
from edgefl.lab.state import State
from edgefl.network import Access, NetworkPlan, make_topology

FILE = """
[method]
name = "fedavg"
[fleet]
devices = { laptop = 2 }
[data]
name = "synthetic"
num_owners = 2
examples_per_owner = 20
[model]
name = "linear"
[stop]
rounds = 1
"""
NETWORK = NetworkPlan(
    make_topology("complete", 2, 0), (Access(up_bytes_per_s=1e6, down_bytes_per_s=1e6),) * 2
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with a file in it; labs' files go there, and everybody is root."""
    (tmp_path / "file.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(state, "FOLDER", tmp_path / "state")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system, "has_netem", lambda: False)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("arguments", [("up", "file.toml"), ("down",), ("status",)])
def test_root_is_needed(place: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = call("lab", *arguments)
    assert result.exit_code == 2
    assert result.stderr == "edgefl: lab = 'user 1000': root: network namespaces need it (sudo edgefl ...)\n"


def test_a_run_in_the_lab_needs_root_and_leaves_no_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = call("run", "file.toml", "--runtime", "local", "--lab", "--out", "out", "--quiet")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert not (place / "out").exists()


def test_a_run_in_virtual_time_has_no_lab(place: Path) -> None:
    result = call("run", "file.toml", "--lab", "--out", "out", "--quiet")
    assert result.exit_code == 2
    assert "it goes with --runtime local" in result.stderr


def test_the_programs_are_needed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = call("lab", "up", "file.toml")
    assert result.exit_code == 2
    assert "apt-get install iproute2" in result.stderr


def test_names_that_others_have_are_left_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(system, "existing", lambda names: ["edgefl-lab-0"])
    result = call("lab", "up", "file.toml")
    assert result.exit_code == 2
    assert "edgefl: lab = 'edgefl-lab-0': a free name" in result.stderr
    assert not state.FOLDER.exists()


def test_a_second_lab_of_a_name_is_refused(place: Path) -> None:
    first = State(layout(NETWORK, "lab", has_netem=False), None, "now")
    state.claim(first)
    assert state.read("lab") == first
    result = call("lab", "up", "file.toml", "--set", 'network.link={up="1 MB/s",down="1 MB/s"}')
    assert result.exit_code == 2
    assert "a lab is up already" in result.stderr
    state.forget("lab")
    assert state.read("lab") is None


def test_no_lab_is_no_failure_of_down(place: Path) -> None:
    assert (call("lab", "down").stdout, call("lab", "down").exit_code) == ("no lab is up\n", 0)
    assert (call("lab", "status").stdout, call("lab", "status").exit_code) == ("no lab is up\n", 1)


def test_a_run_does_not_take_a_lab_of_other_links(place: Path) -> None:
    state.claim(State(layout(NETWORK, "lab", has_netem=False), None, "now"))
    with pytest.raises(system.ConfigError, match="other links"), build.kept_up(_thinner()):
        pytest.fail("it took it")


def _thinner() -> NetworkPlan:
    return NetworkPlan(NETWORK.topology, (Access(up_bytes_per_s=1e5, down_bytes_per_s=1e6),) * 2)
