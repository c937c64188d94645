"""The commands: what they print where, and the exit codes that scripts trust."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from edgefl.cli import app

TINY = """
name = "tiny"
[method]
name = "fedavg"
[fleet]
devices = { laptop = 3 }
[data]
name = "synthetic"
num_owners = 3
examples_per_owner = 40
[model]
name = "linear"
[train]
local_steps = 1
[stop]
rounds = 3
[smoke.stop]
rounds = 1
"""
COMMANDS = [
    "run", "compare", "sweep", "report", "export", "check", "methods", "devices", "links", "doctor", "node",
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a small experiment in it."""
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EDGEFL_DEBUG", raising=False)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def program(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgefl.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_help_loads_no_library(tmp_path: Path) -> None:
    code = (
        "import sys; from edgefl.cli import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'matplotlib', 'pandas', 'grpc'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", done.stdout)
    assert "130 interrupted" in re.sub(r"\s+", " ", done.stdout)


def test_help_shows_all_of_its_words() -> None:
    """The terminal takes [words] in brackets for styles, and leaves them out."""
    assert "table `smoke` over it" in re.sub(r"[\s│]+", " ", call("run", "--help").stdout)
    for name in COMMANDS:
        command = typer.main.get_command(app).commands[name]
        texts = [command.help, *(getattr(one, "help", None) for one in command.params)]
        assert not any("[" in text for text in texts if text), name


def test_version() -> None:
    assert re.fullmatch(r"edgefl \d+\.\d+\.\d+\n", call("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "absent.toml"], "FILE = 'absent.toml'"),
        (["run"], "FILE"),
        (["run", "tiny.toml", "--set", "train.learning_rat=1"], "train.learning_rat = 1"),
        (["run", "tiny.toml", "--set", "train"], "--set = 'train'"),
        (["run", "tiny.toml", "--method", "fedavgg"], "did you mean 'fedavg'"),
        (["run", "tiny.toml", "--runtime", "real"], "--runtime = 'real'"),
        (["run", "tiny.toml", "--processes"], "--processes"),
        (["run", "tiny.toml", "--out", "."], "--out = '.'"),
        (["run", "tiny.toml", "--resume", "x"], "--resume = 'x'"),
        (["run", "--resume", "x"], "--resume = 'x'"),
        (["compare", "tiny.toml", "--methods", ","], "--methods"),
        (["compare", "tiny.toml", "--methods", "fedavg", "--seeds", "1,b"], "--seeds = '1,b'"),
        (["compare", "tiny.toml", "--methods", "fedavg", "--num-seeds", "0"], "--num-seeds = 0"),
        (["sweep", "tiny.toml", "--grid", "stop.rounds"], "--grid = 'stop.rounds'"),
        (["report", "."], "DIR = '.'"),
        (["export", "."], "DIR = '.'"),
        (["export", ".", "--format", "trac"], "did you mean 'trace'"),
    ],
)
def test_a_mistake_is_refused_in_one_line(place: Path, arguments: list[str], said: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.startswith("edgefl: ")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in place.iterdir()] == ["tiny.toml"]


def test_run_shows_a_table_and_leaves_a_report(place: Path) -> None:
    done = call("run", "tiny.toml", "--out", "made")
    assert done.exit_code == 0
    assert "final accuracy" in done.stdout
    assert "report: made/report.html" in done.stdout
    assert "seed 0: starts" in done.stderr
    assert (place / "made" / "report.html").exists()


def test_json_is_all_that_json_prints(place: Path) -> None:
    done = call("run", "tiny.toml", "--smoke", "--seed", "5", "--method", "d-psgd", "--json", "--out", "made")
    assert done.exit_code == 0
    assert done.stderr == ""
    summary = json.loads(done.stdout)
    assert (summary["method"], summary["seed"], summary["run_dir"]) == ("d-psgd", 5, "made")
    assert "rounds = 1\n" in (place / "made" / "experiment.toml").read_text()


def test_export_and_report_of_a_run(place: Path) -> None:
    assert call("run", "tiny.toml", "--out", "made", "--quiet").exit_code == 0
    for name in ("report.html", "trace.json"):
        (place / "made" / name).unlink()
    assert call("report", "made").stdout == "report: made/report.html\n"
    assert call("export", "made").stdout.startswith("trace: made/trace.json")
    assert json.loads((place / "made" / "trace.json").read_text())
    assert call("run", "tiny.toml", "--out", "other", "--method", "d-psgd", "--quiet").exit_code == 0
    assert call("report", "made", "other", "--out", "both.html").stdout == "report: both.html\n"
    assert (place / "both.html").exists()


def test_compare_says_which_run_failed(place: Path) -> None:
    (place / "raises.py").write_text(
        "from edgefl.nodes import Method\n"
        "async def peer(node):\n    raise ValueError('boom')\n"
        "METHOD = Method(name='raises', title='', paper='', roles={'peer': peer}, messages=(),\n"
        "                ends_with=('peer',), needs='any', evaluates='each')\n"
    )
    arguments = ["compare", "tiny.toml", "--methods", "fedavg,raises.py", "--jobs", "1", "--out", "made"]
    done = call(*arguments, "--json")
    assert done.exit_code == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["label"], line["status"]) for line in lines] == [
        ("fedavg-0", "finished"),
        ("raises-0", "failed"),
    ]
    assert "raises-0 failed: " in done.stderr
    assert "boom" in done.stderr
    assert call("report", "made").stdout == "report: made/comparison.html\n"


def test_a_failing_run_ends_with_1_and_debug_shows_where(place: Path) -> None:
    (place / "broken.py").write_text(
        "from edgefl.nodes import Method\n"
        "async def peer(node):\n    raise ValueError('boom')\n"
        "METHOD = Method(name='broken', title='', paper='', roles={'peer': peer}, messages=(),\n"
        "                ends_with=('peer',), needs='any', evaluates='each')\n"
    )
    done = program("run", "tiny.toml", "--method", "broken.py", "--quiet", "--debug", cwd=place)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    quiet = call("run", "tiny.toml", "--method", "broken.py", "--quiet")
    assert quiet.exit_code == 1
    assert "boom" in quiet.stderr
    assert "Traceback" not in quiet.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_sigterm_leaves_a_run_that_can_go_on(place: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "edgefl.cli",
        "run",
        "tiny.toml",
        "--set",
        "stop.rounds=1000000",
        "--out",
        "made",
    ]
    with subprocess.Popen(command, cwd=place, stderr=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 60
        while not (place / "made").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # let the run begin: in its first moments its folder still says "running"
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "edgefl: interrupted; edgefl run --resume made goes on" in said
    assert json.loads((place / "made" / "run.json").read_text())["status"] == "interrupted"


def test_methods_and_devices_for_machines() -> None:
    methods = [json.loads(line) for line in call("methods", "--json").stdout.splitlines()]
    fedavg = next(one for one in methods if one["name"] == "fedavg")
    assert fedavg["family"] == "federated"
    assert fedavg["roles"] == ["server", "client"]
    devices = {one["name"]: one for one in map(json.loads, call("devices", "--json").stdout.splitlines())}
    assert devices["raspberry-pi-4b"]["compute_flops"] > 1e9


def test_methods_and_devices_for_people() -> None:
    assert "D-PSGD".lower() in call("methods").stdout
    assert "Raspberry Pi 4" in call("devices").stdout


def test_one_method_with_its_settings() -> None:
    shown = call("methods", "asyncdrop").stdout
    assert "[method.asyncdrop]" in shown and "drop_fraction" in shown and "0.25" in shown
    found = json.loads(call("methods", "fedavg", "--json").stdout)
    assert {"key": "server_rate", "takes": "number > 0", "default": "1.0"}.items() <= next(
        one for one in found["settings"] if one["key"] == "server_rate"
    ).items()
    refused = call("methods", "fedagv")
    assert refused.exit_code == 2 and "fedavg" in refused.stderr and refused.stderr.count("\n") == 1


def test_node_is_refused_without_its_fleet(place: Path) -> None:
    result = call("node", "--fleet", "fleet.toml", "--id", "3")
    assert result.exit_code == 2
    assert "--fleet = 'fleet.toml': no such file" in result.stderr


def test_no_number_is_null(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from edgefl.commands.shared import emit

    emit({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x")})
    assert capsys.readouterr().out == '{"a": null, "b": [null, 1.5], "c": "x"}\n'


@pytest.mark.skipif(os.name == "nt", reason="pipes that break")
@pytest.mark.parametrize("environment", [{}, {"PYTHONUNBUFFERED": "1"}])
@pytest.mark.parametrize("words", ["--help", "methods", "devices --json", "run tiny.toml --out a"])
def test_a_reader_that_stops_early_is_nothing_to_speak_of(
    place: Path, words: str, environment: dict[str, str]
) -> None:
    """The reader of what is printed, and in a run of its progress, is gone from the beginning."""
    command = [sys.executable, "-m", "edgefl.cli", *words.split()]
    there, here = os.pipe()
    os.close(there)
    done = subprocess.run(
        command,
        stdout=here,
        stderr=here if "run" in words else subprocess.PIPE,
        env={**os.environ, **environment},
    )
    os.close(here)
    assert done.returncode == 0 and not done.stderr
    if "run" in words:
        assert json.loads(Path("a/run.json").read_text())["status"] == "finished"


def test_one_device_and_one_link_with_their_sources() -> None:
    found = json.loads(call("devices", "pi-4", "--json").stdout)
    assert found["name"] == "raspberry-pi-4b"
    hpl = next(source for source in found["sources"] if "busy_w" in source["figures"])
    assert hpl["url"] == "https://github.com/geerlingguy/top500-benchmark" and hpl["verified"]
    assert "11.889 Gflops" in call("devices", "pi-4").stdout
    assert "not verified" in call("devices", "jetson-agx-orin").stdout
    links = [json.loads(line)["name"] for line in call("links", "--json").stdout.splitlines()]
    assert {"home", "lte", "wifi-5"} <= set(links)
    shown = call("links", "starlink").stdout
    assert "104.97 down" in shown and "starlink" in call("links").stdout
    for command, word in (("devices", "raspberry-pi-44"), ("links", "ltee")):
        refused = call(command, word)
        assert refused.exit_code == 2 and refused.stderr.startswith(f"edgefl: NAME = '{word}': did you mean")


@pytest.mark.skipif(os.name == "nt", reason="a shell of another kind")
@pytest.mark.parametrize(
    ("words", "environment"),
    [
        ("devices", {"PYTHONIOENCODING": "ascii"}),
        ("run tiny.toml --out 'ü Ж'", {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        ("run tiny.toml --out a <&- >&-", {}),
        ("run tiny.toml --out a 2>&-", {}),
        ("compare tiny.toml --methods fedavg --out a <&- >&- 2>&-", {}),
        (
            "run tiny.toml --out a",
            {"TERM": "dumb", "COLUMNS": "20", "TMPDIR": "/nonexistent", "HOME": "/proc"},
        ),
    ],
)
def test_poor_surroundings_are_enough(place: Path, words: str, environment: dict[str, str]) -> None:
    command = f"{sys.executable} -m edgefl {words}"
    done = subprocess.run(
        command, shell=True, cwd=place, env={**os.environ, **environment}, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    if "--out" in words:
        (folder,) = (path for path in place.iterdir() if path.is_dir())
        run = folder / "fedavg-0" if words.startswith("compare") else folder
        assert json.loads((run / "run.json").read_text(encoding="utf-8"))["status"] == "finished"


@pytest.mark.skipif(os.name == "nt", reason="a folder in use stays there")
def test_a_working_directory_that_is_gone_is_refused(place: Path) -> None:
    command = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m edgefl methods"
    done = subprocess.run(command, shell=True, cwd=place, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("edgefl: the working directory is gone")


FRONT = """
import signal
from edgefl import cli
def app(_):
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
cli.app = app
try:
    cli.main()
finally:
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is signal.SIG_DFL
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interruption_inside_an_exec_ends_with_130_too(place: Path) -> None:
    """Dataclasses are made by one while libraries load: CPython would end the process by SIGINT."""
    (place / "front.py").write_text(FRONT)
    done = subprocess.run([sys.executable, "-m", "front"], cwd=place, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_while_the_program_loads_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgefl.__main__ import main

    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "edgefl.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "edgefl.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
