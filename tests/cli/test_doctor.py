"""The checks of this machine: what is found wrong is told with what helps."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgefl import doctor
from edgefl.cli import app
from edgefl.data.download import cache_folder
from edgefl.errors import ConfigError


def test_a_child_that_dies_is_a_finding_with_its_signal() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    found = doctor.check_native("torch", code, "another build")
    assert (found.state, found.advice) == ("fail", "another build")
    assert found.found.startswith("its import is ended by SIGILL: this build uses instructions")


def test_a_missing_library_is_named() -> None:
    found = doctor.check_native("grpc", "import no_such_module_at_all", "install it")
    assert found.found == "ModuleNotFoundError: No module named 'no_such_module_at_all'"


def test_a_child_that_hangs_is_given_up() -> None:
    found = doctor.check_native("torch", "import time; time.sleep(60)", "", timeout_s=0.3)
    assert found.found == "no answer in 0.3 s"


def test_32_bit_is_refused_with_the_way_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    found = doctor.check_python()
    assert found.state == "fail"
    assert "64-bit" in found.advice


def test_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert doctor.check_reach(f"127.0.0.1:{port}").state == "ok"
    closed = doctor.check_reach(f"127.0.0.1:{port}")
    assert (closed.state, closed.found) == ("fail", f"127.0.0.1 is there, nothing listens on port {port}")
    for wrong in ("localhost", "localhost:", "localhost:0", "localhost:99999", ":80"):
        assert doctor.check_reach(wrong).found == "not an address"


def test_a_folder_that_takes_no_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = doctor.check_writable("home", tmp_path / "file", "set HOME")
    assert (found.state, found.advice) == ("warn", "set HOME")
    assert doctor.check_writable("home", tmp_path / "not" / "yet", "").state == "ok"


def test_a_missing_extra_comes_with_its_pip_line() -> None:
    found = doctor.check_extra("report", ["sys", "no_such_module_at_all"])
    assert found.found == "not installed: no_such_module_at_all"
    assert found.advice == "pip install 'edgefl[report]'"


def test_the_command_fails_when_something_does() -> None:
    done = CliRunner().invoke(app, ["doctor", "localhost", "--json"])
    assert done.exit_code == 1
    findings = {one["check"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert findings["localhost"]["state"] == "fail"
    assert {"python", "torch", "grpc", "memory", "disk", "home", "runs", "data", "report"} <= set(findings)
    assert findings["torch"]["state"] == "ok"


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    found = doctor.check_home()
    assert found.state == "warn" and "set HOME or XDG_CACHE_HOME" in found.advice
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="set HOME or XDG_CACHE_HOME"):
        cache_folder()
