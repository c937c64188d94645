"""docker-compose.yml, from nothing to teardown: on an engine started for it, with images built here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgefl.experiment.config import load_experiment
from edgefl.experiment.runner import run_experiment

pytestmark = pytest.mark.containers

ROOT = Path(__file__).parents[2]
ENGINE = Path(__file__).with_name("engine.sh")
CACHE = Path(
    os.environ.get("EDGEFL_ENGINE_CACHE") or Path(os.environ.get("TMPDIR") or "/tmp", "edgefl-engine")
)
SERVICES = {"server", "pi-1", "pi-2", "pi-3", "laptop-1", "laptop-2"}
FILES = ("pyproject.toml", "LICENSE", "README.md", ".dockerignore", "docker-compose.yml")
FOLDERS = ("edgefl", "clients", "server", "experiments")
START_S, RUN_S = 240.0, 240.0


@pytest.fixture(scope="module")
def engine() -> Iterator[dict[str, str]]:
    """The environment in which docker and docker-compose speak to an engine of their own."""
    if os.geteuid() != 0:
        pytest.skip("an engine is started by root")
    subprocess.run([ENGINE, "start"], env=os.environ | {"PYTHON": sys.executable}, check=True)
    try:
        yield {
            "PATH": f"/usr/sbin:/usr/bin:/sbin:/bin:{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/root"),
            "DOCKER_HOST": f"unix://{CACHE}/docker.sock",
            "DOCKER_BUILDKIT": "1",
            "COMPOSE_DOCKER_CLI_BUILD": "1",
            "PIP_NO_INDEX": "1",
            "EDGEFL_UID": "12345",
            "EDGEFL_GID": "12345",
        }
    finally:
        subprocess.run([ENGINE, "stop"], check=True)


class Composed:
    """The project of docker-compose.yml, in a copy of what it is built from."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        for name in FILES:
            shutil.copy(ROOT / name, folder)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(CACHE / "wheels", folder / "wheels", copy_function=os.link)

    def __call__(self, *words: str) -> str:
        """docker-compose with these words; its standard output."""
        return self._call("docker-compose", "-p", "edgefltest", *words)

    def docker(self, *words: str) -> str:
        return self._call("/usr/bin/docker", *words)

    def _call(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def states(self) -> dict[str, dict[str, object]]:
        """What the engine says of each service's container."""
        ids = self("ps", "-q").split()
        found = json.loads(self.docker("inspect", *ids))
        return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in found}

    def healthy(self) -> set[str]:
        return {name for name, one in self.states().items() if _health(one) == "healthy"}


def _health(container: dict[str, object]) -> object:
    state = container["State"]
    assert isinstance(state, dict)
    return state.get("Health", {}).get("Status")


@pytest.fixture(scope="module")
def composed(engine: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    project = Composed(tmp_path_factory.mktemp("compose"), engine)
    project("build")
    project("up", "-d", "--no-build")
    try:
        yield project
    finally:
        project("down", "-v")


def test_from_nothing_to_a_run_folder(composed: Composed, tmp_path: Path) -> None:
    seen: set[str] = set()
    deadline = time.monotonic() + START_S
    while seen != SERVICES and time.monotonic() < deadline:
        seen |= composed.healthy()
        time.sleep(1.0)
    assert seen == SERVICES
    states = composed.states()
    config = states["pi-1"]["Config"], states["pi-1"]["HostConfig"]
    assert (config[0]["User"], config[1]["NanoCpus"], config[1]["ReadonlyRootfs"]) == (
        "12345:12345",
        400_000_000,
        True,
    )

    exits: dict[str, object] = {}
    deadline = time.monotonic() + RUN_S
    while len(exits) < len(SERVICES) and time.monotonic() < deadline:
        time.sleep(1.0)
        ended = {
            n: one["State"] for n, one in composed.states().items() if one["State"]["Status"] == "exited"
        }
        exits = {name: state["ExitCode"] for name, state in ended.items()}
    assert exits == dict.fromkeys(SERVICES, 0), composed("logs", "--no-color", "--tail=20")

    server = composed("ps", "-q", "server").strip()
    composed.docker("cp", f"{server}:/runs/compose", str(tmp_path / "compose"))
    record = json.loads((tmp_path / "compose" / "run.json").read_text())
    assert (record["status"], record["runtime"], record["summary"]["nodes"]) == ("finished", "fleet", 6)
    assert (tmp_path / "compose" / "report.html").stat().st_size > 10_000

    experiment = load_experiment(ROOT / "experiments" / "compose.toml")
    virtual = run_experiment(experiment, out=tmp_path / "virtual").summary
    measured = record["summary"]
    print(
        f"accuracy {measured['final_accuracy']:.3f} in containers, {virtual['final_accuracy']:.3f} in virtual"
        f" time; {measured['time_s']:.1f} s, {virtual['time_s']:.1f} s predicted"
    )
    assert measured["final_accuracy"] == pytest.approx(virtual["final_accuracy"], abs=0.02)
    assert measured["payload_bytes"] == virtual["payload_bytes"]
