"""From a file to a run folder: what is in it, that it repeats, and what is left when things go wrong."""

from __future__ import annotations

import csv
import errno
import json
import pickle
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiment_files import small_file
from safetensors.torch import load_file

import edgefl
from edgefl.errors import ConfigError, ProgramFailed, RunError
from edgefl.experiment import folder as folder_module
from edgefl.experiment import runner
from edgefl.experiment.config import load_experiment
from edgefl.experiment.folder import COLUMNS
from edgefl.experiment.observer import RunObserver
from edgefl.experiment.results import load
from edgefl.experiment.runner import resume, run_experiment
from edgefl.nodes.registry import methods

REPEATED = ("metrics.csv", "curve.csv", "evaluations.csv", "nodes.csv", "traffic.csv", "spans.csv")


@pytest.fixture(autouse=True)
def no_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have tests of their own."""
    monkeypatch.setattr(runner, "_write_views", lambda folder: None)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_its_folder(tmp_path: Path) -> None:
    result = run_experiment(load_experiment(small_file(tmp_path)), out=tmp_path / "run")
    summary, record = result.summary, json.loads((result.folder / "run.json").read_text())
    assert record["schema"] == 1
    assert (record["status"], record["reason"]) == ("finished", "the method ended")
    assert record["summary"] == summary
    assert {"edgefl", "python", "torch", "numpy"} <= record["versions"].keys()
    assert not (result.folder / "predicted.csv").exists(), "a run in virtual time is its own prediction"
    for name, columns in COLUMNS.items():
        if name == "predicted":
            continue
        header = (result.folder / f"{name}.csv").read_text().splitlines()[0]
        assert header == ",".join(columns)
    curve = rows(result.folder / "curve.csv")
    assert [int(row["step"]) for row in curve] == [0, 1, 2, 3, 4]  # every round, and the start
    assert float(curve[-1]["value"]) == summary["final_accuracy"] == summary["final_metric"]
    assert float(curve[-1]["loss"]) < float(curve[0]["loss"])
    assert int(curve[-1]["payload_bytes"]) == summary["payload_bytes"] > 0
    nodes = rows(result.folder / "nodes.csv")
    assert [row["role"] for row in nodes] == ["server"] + ["client"] * 4
    assert sum(int(row["num_examples"]) for row in nodes) == 400
    assert sum(float(row["joules"]) for row in nodes) == pytest.approx(summary["joules"])
    assert sum(int(row["count"]) for row in rows(result.folder / "partition.csv")) == 400
    model = load_file(result.folder / "model.safetensors")
    assert model["output.weight"].shape == (10, 12)
    assert not list(result.folder.glob(".*"))


def test_payload_is_what_the_rounds_must_carry(tmp_path: Path) -> None:
    summary = run_experiment(load_experiment(small_file(tmp_path)), out=tmp_path / "run").summary
    model_bytes = 4 * (64 * 16 + 16 + 16 * 12 + 12 + 12 * 10 + 10)
    assert summary["payload_bytes"] == 4 * 4 * 2 * model_bytes  # rounds, clients, down and up
    assert summary["wire_bytes"] > summary["encoded_bytes"] > summary["payload_bytes"]


def test_the_same_seed_gives_the_same_bytes_and_another_other_ones(tmp_path: Path) -> None:
    path = small_file(tmp_path)
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        run_experiment(load_experiment(path, seed=seed), out=tmp_path / name)
    for name in REPEATED:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    different = [
        n for n in REPEATED if (tmp_path / "one" / n).read_bytes() != (tmp_path / "other" / n).read_bytes()
    ]
    assert {"metrics.csv", "curve.csv", "evaluations.csv"} <= set(different)


def test_the_resolved_file_repeats_the_run(tmp_path: Path) -> None:
    run_experiment(load_experiment(small_file(tmp_path), method="ad-psgd"), out=tmp_path / "one")
    again = load_experiment(tmp_path / "one" / "experiment.toml")
    run_experiment(again, out=tmp_path / "two")
    for name in (*REPEATED, "experiment.toml"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


@pytest.mark.parametrize("method", sorted(methods()))
def test_every_method_runs(tmp_path: Path, method: str) -> None:
    overrides = ["stop={rounds=2, time_s=30}", "evaluate={every_s=0.5, max_nodes=3}"]
    if method == "fedcore":  # it counts in epochs
        overrides.append("train={learning_rate=0.1, batch_size=16, local_epochs=1}")
    experiment = load_experiment(small_file(tmp_path), overrides, method=method)
    result = run_experiment(experiment, out=tmp_path / "run")
    summary = result.summary
    assert summary["status"] in ("finished", "stopped")
    holders = [row for row in rows(result.folder / "nodes.csv") if int(row["num_examples"]) > 0]
    assert len(holders) == (1 if methods()[method].pools_data else 4)
    assert 0 < summary["final_accuracy"] <= 1
    assert summary["spread"]["worst_tenth"] <= summary["spread"]["mean"] <= summary["spread"]["best"]
    assert (summary["messages"] == 0) == (methods()[method].family == "reference")
    evaluated = {row["node"] for row in rows(result.folder / "evaluations.csv")}
    own = {"each": 3, "server": 1, "mean": 1, "parts": 1}
    assert len(evaluated) == own.get(methods()[method].evaluates, len(evaluated)) > 0


def test_a_target_stops_the_run_or_only_marks_it(tmp_path: Path) -> None:
    path = small_file(tmp_path)
    stops = load_experiment(path, ["stop={rounds=40, target={metric='accuracy', value=0.3}}"])
    marks = load_experiment(path, ["stop={rounds=40, target={metric='accuracy', value=0.3, stop=false}}"])
    first = run_experiment(stops, out=tmp_path / "stops").summary
    second = run_experiment(marks, out=tmp_path / "marks").summary
    assert (first["status"], first["reason"]) == ("stopped", "target reached")
    assert first["time_to_target_s"] == second["time_to_target_s"] == first["time_s"] < second["time_s"]
    assert second["target"] == {"metric": "accuracy", "value": 0.3}
    missed = load_experiment(path, ["stop={rounds=1, target={metric='loss', value=0.001}}"])
    assert run_experiment(missed, out=tmp_path / "missed").summary["time_to_target_s"] is None


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    with pytest.raises(ConfigError, match="it exists already"):
        run_experiment(load_experiment(small_file(tmp_path)), out=out)
    assert not list(out.iterdir())


def test_a_folder_that_another_process_works_in_is_left_alone(tmp_path: Path) -> None:
    run = run_experiment(load_experiment(small_file(tmp_path)), out=tmp_path / "run")
    before = {file.name: file.read_bytes() for file in run.folder.iterdir()}
    with folder_module.alone(run.folder, "--out"), pytest.raises(ConfigError, match="another process"):
        resume(run.folder)
    assert {file.name: file.read_bytes() for file in run.folder.iterdir()} == before


def test_a_record_that_lost_its_keys_is_not_resumed(tmp_path: Path) -> None:
    run = run_experiment(load_experiment(small_file(tmp_path)), out=tmp_path / "run")
    (run.folder / "run.json").write_text('{"schema": 1}')
    with pytest.raises(ConfigError, match=r"run\.json says None"):
        resume(run.folder)


def test_a_folder_that_there_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        run_experiment(load_experiment(small_file(tmp_path)), out=tmp_path / ("a" * 300))


def test_folders_are_numbered_when_their_name_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment(small_file(tmp_path), smoke=True)
    names = [run_experiment(experiment).folder.name for _ in range(2)]
    assert names[0].endswith("-small-fedavg-3")
    assert names[1] == f"{names[0]}-2"


def test_a_full_disk_at_the_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_module.os, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        run_experiment(load_experiment(small_file(tmp_path)), out=tmp_path / "deep" / "run")
    assert not list((tmp_path / "deep").iterdir())


def test_a_full_disk_at_the_end_leaves_a_run_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = small_file(tmp_path), tmp_path / "run"
    whole = run_experiment(load_experiment(path), out=tmp_path / "whole").summary
    write = folder_module.RunFolder.write_table

    def full(self: folder_module.RunFolder, name: str, table: Any) -> None:
        if name == "traffic":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, table)

    with monkeypatch.context() as patch, pytest.raises(RunError, match="No space left"):
        patch.setattr(folder_module.RunFolder, "write_table", full)
        run_experiment(load_experiment(path), out=out)
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    resumed = resume(out).summary
    assert {**resumed, "wall_s": 0, "run_dir": ""} == {**whole, "wall_s": 0, "run_dir": ""}


def test_an_interrupted_run_goes_on_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = small_file(tmp_path), tmp_path / "run"
    run_experiment(load_experiment(path), out=tmp_path / "whole")
    published = RunObserver.published

    def interrupted(self: RunObserver, node: int, time_s: float, step: int, *rest: Any) -> bool:
        if step == 3:
            raise KeyboardInterrupt
        return published(self, node, time_s, step, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunObserver, "published", interrupted)
        run_experiment(load_experiment(path), out=out)
    assert load(out).record["status"] == "interrupted"
    assert len(rows(out / "curve.csv")) == 3
    resume(out)
    for name in REPEATED:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    with pytest.raises(ConfigError, match="this one finished"):
        resume(out)


@pytest.mark.parametrize("method", ["fedavg", "d-psgd"])
def test_a_run_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    experiment = load_experiment(small_file(tmp_path), ["execution.checkpoint_s=1e-9"], method=method)
    run_experiment(experiment, out=tmp_path / "whole")
    out, published = tmp_path / "run", RunObserver.published
    steps: list[int] = []

    def interrupted(self: RunObserver, node: int, time_s: float, step: int, *rest: Any) -> bool:
        steps.append(step)
        if step == 3 and steps.count(3) == 1:
            raise KeyboardInterrupt
        return published(self, node, time_s, step, *rest)

    monkeypatch.setattr(RunObserver, "published", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, out=out)
    assert (out / "checkpoint").exists()
    steps.clear()
    steps.append(3)
    resume(out)
    assert 1 not in steps and 4 in steps  # nothing was done again
    for name in REPEATED:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not (out / "checkpoint").exists()


def test_a_run_that_does_not_repeat_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"

    def interrupted(self: RunObserver, time_s: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunObserver, "tick", interrupted)
        run_experiment(load_experiment(small_file(tmp_path), ["evaluate.every_s=0.2"]), out=out)
    curve = (out / "curve.csv").read_text()
    (out / "curve.csv").write_text(curve.replace("0.0,0,0.", "0.0,0,0.1"))
    with pytest.raises(RunError, match="not the beginning of the same run"):
        resume(out)


def test_a_failing_program_is_told(tmp_path: Path) -> None:
    own = tmp_path / "broken.py"
    own.write_text(
        "from edgefl.nodes import Method\n"
        "async def server(node):\n"
        "    await node.sleep(1.0)\n"
        "    raise ZeroDivisionError('on purpose')\n"
        "async def client(node):\n"
        "    await node.sleep(9.0)\n"
        "METHOD = Method(name='broken', title='', paper='', roles={'server': server, 'client': client},\n"
        "    messages=(), ends_with=('server',), needs='star', evaluates='server')\n"
    )
    experiment = load_experiment(small_file(tmp_path), method=str(own))
    with pytest.raises(ProgramFailed, match=r"server 0 .laptop. failed at 1\.000 s"):
        run_experiment(experiment, out=tmp_path / "run")
    record = load(tmp_path / "run").record
    assert record["status"] == "failed"
    assert record["error"].count("on purpose") >= 1 and "broken.py" in record["error"]


def test_from_python(tmp_path: Path) -> None:
    run = edgefl.run(small_file(tmp_path), smoke=True, train__learning_rate=0.05, out=tmp_path / "run")
    assert run.summary["final_accuracy"] == run.curve["value"].iloc[-1]
    assert list(run.nodes["device"]) == ["laptop"] * 3
    assert "learning_rate = 0.05" in (tmp_path / "run" / "experiment.toml").read_text()
    assert edgefl.load(tmp_path / "run").summary == run.summary
    with pytest.raises(ConfigError, match="a run's folder"):
        edgefl.load(tmp_path)
    tables = tomllib.loads((tmp_path / "small.toml").read_text())
    again = edgefl.run(tables, out=tmp_path / "again", smoke=True, train__learning_rate=np.float64(0.05))
    assert again.summary["final_loss"] == run.summary["final_loss"]
    assert pickle.loads(pickle.dumps(again)).summary == again.summary
    with pytest.raises(ConfigError, match=r"train\.learning_rate = .*: a text, a number"):
        edgefl.run(tables, train__learning_rate=object())


def test_progress_hears_of_begin_values_and_end(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Recorder:
        def begin(self, description: str, **limits: Any) -> None:
            heard.append((description, limits))

        def update(
            self, time_s: float, step: int, value: float | None, target: float | None, wall_s: float
        ) -> None:
            heard.append((step, value))

        def end(self, status: str) -> None:
            heard.append(status)

    run_experiment(load_experiment(small_file(tmp_path)), out=tmp_path / "run", progress=Recorder())
    limits = {"time_s": None, "rounds": 4, "metric": "accuracy", "target": None}
    assert heard[0] == ("fedavg on 5 nodes, seed 3", limits)
    assert heard[-1] == "finished"
    assert [step for step, value in heard[1:-1] if value is not None] == [0, 1, 2, 3, 4]


def test_over_grpc_the_run_is_the_same(tmp_path: Path) -> None:
    """A synchronous method comes to the same model on both runtimes, to rounding, with the same bytes."""
    path = small_file(tmp_path)
    virtual = run_experiment(load_experiment(path), out=tmp_path / "virtual").summary
    local = run_experiment(load_experiment(path), out=tmp_path / "local", runtime="local").summary
    for key in ("messages", "payload_bytes", "encoded_bytes", "nodes", "status"):
        assert local[key] == virtual[key], key
    assert local["final_loss"] == pytest.approx(virtual["final_loss"], rel=1e-4)
    assert int(rows(tmp_path / "local" / "curve.csv")[-1]["payload_bytes"]) == local["payload_bytes"]
    spread = run_experiment(load_experiment(path, method="d-psgd"), out=tmp_path / "peers", runtime="local")
    assert all(row["metric"] for row in rows(spread.folder / "nodes.csv"))


def test_over_grpc_a_fleet_target_cannot_be_the_only_end(tmp_path: Path) -> None:
    experiment = load_experiment(small_file(tmp_path), ["stop={target={value=0.5}}"], method="d-psgd")
    with pytest.raises(ConfigError, match="give rounds or time_s"):
        run_experiment(experiment, out=tmp_path / "run", runtime="local")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_for_each_node(tmp_path: Path) -> None:
    path = small_file(tmp_path)
    virtual = run_experiment(load_experiment(path), out=tmp_path / "virtual").summary
    result = run_experiment(load_experiment(path), out=tmp_path / "run", runtime="local", processes=True)
    assert result.summary["payload_bytes"] == virtual["payload_bytes"]
    assert result.summary["final_loss"] == pytest.approx(virtual["final_loss"], rel=1e-4)
    assert {row["node"] for row in rows(result.folder / "spans.csv")} == {"0", "1", "2", "3", "4"}


def test_quickstart_smokes(tmp_path: Path) -> None:
    quickstart = Path(__file__).parents[2] / "experiments" / "quickstart.toml"
    summary = run_experiment(load_experiment(quickstart, smoke=True), out=tmp_path / "run").summary
    assert (summary["nodes"], summary["time_s"]) == (25, 5.0)
    assert summary["final_accuracy"] > 0.85


def test_what_a_killed_process_left_of_a_folder_to_come_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".run.999999999.tmp"
    left.mkdir()
    folder_module.RunFolder.create(tmp_path / "other", "", {})
    assert left.exists()
    folder_module.RunFolder.create(tmp_path / "run", "", {})
    assert {path.name for path in tmp_path.iterdir()} == {"other", "run"}
