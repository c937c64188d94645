"""Comparisons and sweeps: statistics by hand, then real runs in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgefl.errors import ConfigError
from edgefl.experiment.batch import Result
from edgefl.experiment.compare import compare
from edgefl.experiment.comparison import Comparison, flat, load_comparison, summarize
from edgefl.experiment.folder import alone, told
from edgefl.experiment.state import State
from edgefl.experiment.statistics import mean_interval, ranks, t_95
from edgefl.experiment.sweep import parse_grid, split_values, sweep

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
target = { metric = "accuracy", value = 0.99, stop = false }
"""
OWN_METHOD = """
import os
from edgefl.nodes import Method

async def peer(node):
    {body}

METHOD = Method(name="{name}", title="", paper="", roles={{"peer": peer}}, messages=(), ends_with=("peer",),
                needs="any", evaluates="each")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small experiment, a method that raises and one that kills its process."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "tiny.toml").write_text(TINY)
    bodies = {
        "raises": 'raise ValueError("boom")',
        "dies": "os.kill(os.getpid(), 9)",
        "silent": "while True: await node.sleep(1.0)",
    }
    for name, body in bodies.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(OWN_METHOD).format(name=name, body=body))
    return folder


class Watcher:
    """Keeps what a batch says; interrupts at the first run's progress when told to."""

    def __init__(self, interrupts: bool = False) -> None:
        self.said: list[tuple[Any, ...]] = []
        self._interrupts = interrupts

    def begin(self, labels: Sequence[str]) -> None:
        self.said.append(("begin", tuple(labels)))

    def started(self, label: str) -> None:
        self.said.append(("started", label))

    def update(self, label: str, state: State) -> None:
        if self._interrupts:
            raise KeyboardInterrupt

    def ended(self, label: str, summary: Mapping[str, Any] | None, reason: str | None, reused: bool) -> None:
        self.said.append(("ended", label, reused))

    def end(self) -> None:
        self.said.append(("end",))


@pytest.fixture(scope="module")
def compared(place: Path) -> Comparison:
    """Two methods that run, and two that fail, on one processor: a dead worker must be replaced."""
    methods = [str(place / "dies.py"), "fedavg", str(place / "raises.py"), "d-psgd"]
    return compare(place / "tiny.toml", methods, jobs=1, out=place / "out")


def result(variant: str, seed: int, time_s: float | None, final: float, metric: str = "accuracy") -> Result:
    summary = {"time_to_target_s": time_s, "final_metric": final, "metric": metric, "status": "stopped"}
    return Result(f"{variant}-{seed}", variant, seed, summary)


def test_interval_of_three_values_by_hand() -> None:
    # s = 1, n = 3: 4.303 x 1 / sqrt(3)
    assert mean_interval([1.0, 2.0, 3.0]) == (2.0, pytest.approx(2.4843, abs=1e-3))
    assert mean_interval([5.0]) == (5.0, None)
    assert mean_interval([]) == (None, None)


def test_the_t_table_errs_on_the_wide_side() -> None:
    assert t_95(10) == 2.228
    assert t_95(11) == 2.228  # the table of 11 says 2.201
    assert t_95(10_000) == 1.980


def test_ranks_share_the_mean_of_tied_places() -> None:
    assert ranks([(2.0,), (1.0,), (2.0,)]) == [2.5, 1.0, 2.5]


def test_rank_is_time_to_target_then_final_metric_per_seed() -> None:
    results = [
        result("a", 0, 10.0, 0.90), result("b", 0, None, 0.95), result("c", 0, None, 0.80),
        result("a", 1, 10.0, 0.90), result("b", 1, 10.0, 0.90), Result("c-1", "c", 1, None, "boom"),
    ]  # fmt: skip
    rows = {row["variant"]: row for row in summarize(results)}
    assert [rows[v]["rank"] for v in "abc"] == [(1 + 1.5) / 2, (2 + 1.5) / 2, 3.0]
    assert (rows["b"]["reached"], rows["b"]["time_to_target_s"]) == (1, 10.0)
    assert (rows["c"]["failed"], rows["c"]["final_metric"]) == (1, 0.80)


def test_less_loss_is_the_better_rank() -> None:
    rows = summarize([result("a", 0, None, 0.4, "loss"), result("b", 0, None, 0.3, "loss")])
    assert [row["rank"] for row in rows] == [2.0, 1.0]


def test_flat_joins_keys() -> None:
    assert flat({"a": 1, "b": {"c": {"d": 2}}}) == {"a": 1, "b.c.d": 2}


def test_one_failure_does_not_stop_the_others(compared: Comparison) -> None:
    assert [r.label for r in compared.results] == ["dies-0", "fedavg-0", "raises-0", "d-psgd-0"]
    assert set(compared.failures) == {"dies-0", "raises-0"}
    assert "SIGKILL" in compared.failures["dies-0"]
    assert "boom" in compared.failures["raises-0"]
    assert [s["status"] for s in compared.summaries] == ["finished", "finished"]
    assert compared.table.loc["fedavg", "runs"] == 1
    assert list(compared.runs["method"]) == ["fedavg", "d-psgd"]


def test_the_folder_says_all_that_python_does(compared: Comparison) -> None:
    for name in ("comparison.json", "comparison.html", "runs.csv", "table.csv", "fedavg-0/report.html"):
        assert (compared.folder / name).stat().st_size > 0
    again = load_comparison(compared.folder)
    assert again.rows == compared.rows
    assert set(again.failures) == set(compared.failures)


def test_what_is_done_is_kept(compared: Comparison, place: Path) -> None:
    watcher = Watcher()
    before = (compared.folder / "fedavg-0" / "run.json").read_bytes()
    again = compare(place / "tiny.toml", ["fedavg", "d-psgd"], out=compared.folder, progress=watcher)
    assert watcher.said[1:] == [("ended", "fedavg-0", True), ("ended", "d-psgd-0", True), ("end",)]
    assert (compared.folder / "fedavg-0" / "run.json").read_bytes() == before
    assert again.summaries == compared.summaries


def test_another_experiment_in_the_folder_is_refused(compared: Comparison, place: Path) -> None:
    with pytest.raises(ConfigError, match="another experiment"):
        compare(place / "tiny.toml", ["fedavg"], out=compared.folder, overrides=["train.learning_rate=0.2"])
    with pytest.raises(ConfigError, match="--out"):
        compare(place / "tiny.toml", ["fedavg"], out=place)


@pytest.mark.parametrize(
    ("methods", "more", "key"),
    [
        ([], {}, "--methods"),
        (["fedavg", "fedavg"], {}, "--methods"),
        (["fedavg"], {"jobs": 0}, "--jobs"),
        (["fedavg"], {"seeds": [-1]}, "--seeds"),
        (["nothing"], {}, "method.name"),
        (["ad-psgd"], {"overrides": ["network.topology=ring"]}, "network.topology"),
    ],
)
def test_refused_before_anything_starts(
    place: Path, methods: list[str], more: dict[str, Any], key: str
) -> None:
    out = place / "refused"
    with pytest.raises(ConfigError) as refusal:
        compare(place / "tiny.toml", methods, out=out, **more)
    assert refusal.value.key == key
    assert not out.exists()


def test_an_interruption_leaves_runs_that_go_on(place: Path) -> None:
    out = place / "interrupted"
    with pytest.raises(KeyboardInterrupt) as stopped:
        compare(
            place / "tiny.toml", ["fedavg"], overrides=["stop.rounds=100000"], out=out, progress=Watcher(True)
        )
    assert str(out) in stopped.value.__notes__[0]
    assert json.loads((out / "fedavg-0" / "run.json").read_text())["status"] == "interrupted"
    assert load_comparison(out).failures == {"fedavg-0": "interrupted by the user"}


def test_two_comparisons_do_not_share_a_folder(place: Path, tmp_path: Path) -> None:
    with alone(tmp_path, "--out"), pytest.raises(ConfigError, match="another process"):
        compare(place / "tiny.toml", ["fedavg"], out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_batch_that_is_killed_takes_its_runs_with_it_and_goes_on(place: Path) -> None:
    """A worker in the middle of a run that has nothing to say hears of it too."""
    out = place / "killed"
    command = [sys.executable, "-m", "edgefl", "compare", "tiny.toml", "--methods", "silent.py", "--quiet"]
    long = ["--out", str(out), "--set", "stop.time_s=1e12", "--set", "evaluate.every_s=1e12"]
    with subprocess.Popen([*command, *long], cwd=place) as batch:
        record = out / "silent-0" / "run.json"
        until(record.exists)
        until(lambda: told(record.parent, json.loads(record.read_text()))["status"] == "running")
        batch.kill()
    until(lambda: json.loads(record.read_text())["status"] == "interrupted")
    assert load_comparison(out).failures


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("change", "key"),
    [({"seeds": ["a"]}, "--seeds"), ({"jobs": "2"}, "--jobs"), ({"seeds": [-1]}, "--seeds")],
)
def test_wrong_types_from_python_are_refused(place: Path, change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        compare(place / "tiny.toml", "fedavg", out=place / "never", **change)
    assert refusal.value.key == key and not (place / "never").exists()
    for grid in ({"stop.rounds": 3}, [("stop.rounds", 3)], {"stop.rounds": []}, {"stop.rounds": "12"}):
        with pytest.raises(ConfigError, match="a list of at least one value"):
            sweep(place / "tiny.toml", grid, out=place / "never")  # type: ignore[arg-type]


def test_a_sweep_runs_every_point(place: Path) -> None:
    grid = {"train.learning_rate": [0.1, 0.2]}
    swept = sweep(place / "tiny.toml", grid, seeds=[3], jobs=1, out=place / "swept", method="local-only")
    assert [r.label for r in swept.results] == ["learning_rate=0.1-3", "learning_rate=0.2-3"]
    files = [(swept.folder / r.label / "experiment.toml").read_text() for r in swept.results]
    assert ["learning_rate = 0.1\n" in files[0], "learning_rate = 0.2\n" in files[1]] == [True, True]
    assert swept.summaries[0]["final_loss"] != swept.summaries[1]["final_loss"]


def test_grids_from_the_command_line() -> None:
    assert split_values('0.1,[1, 2],"a,b"') == ["0.1", "[1, 2]", '"a,b"']
    assert parse_grid(["a.b=1,2", "c=x"]) == {"a.b": ["1", "2"], "c": ["x"]}
    for wrong in (["a"], ["a="], ["a=1,,2"], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match="--grid"):
            parse_grid(wrong)
