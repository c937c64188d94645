"""A compiled kernel does what the interpreted one does: the same files, byte for byte."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import edgefl
from edgefl.doctor import kernel_is_compiled

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SHORT = ("--set", "stop.time_s=12", "--set", "stop.rounds=8", "--set", "evaluate.every_rounds=2")
"""Long enough for devices that crash and return."""

pytestmark = pytest.mark.skipif(not kernel_is_compiled(), reason="the kernel is not compiled")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as it is without what was compiled."""
    folder = tmp_path_factory.mktemp("interpreted")
    shutil.copytree(
        Path(edgefl.__file__).parent, folder / "edgefl", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    return folder


def run(package: Path, *arguments: str) -> None:
    """`edgefl` of the package in this folder."""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    command = [sys.executable, "-m", "edgefl", *arguments]
    subprocess.run(command, env=environment, cwd=package, check=True, capture_output=True)


@pytest.mark.parametrize("method", ["fedavg", "fedasync", "d-psgd", "ad-psgd", "swift", "prague", "divshare"])
def test_a_run_is_the_same_byte_for_byte(method: str, interpreted: Path, tmp_path: Path) -> None:
    command = "run", str(EXPERIMENTS / "churn.toml"), "--method", method, *SHORT, "--out"
    run(Path(edgefl.__file__).parents[1], *command, str(tmp_path / "compiled"))
    run(interpreted, *command, str(tmp_path / "interpreted"))
    for name in ("metrics.csv", "curve.csv", "nodes.csv", "traffic.csv", "events.csv", "model.safetensors"):
        one, other = tmp_path / "compiled" / name, tmp_path / "interpreted" / name
        assert one.read_bytes() == other.read_bytes(), name
