"""The fault laboratory: what it draws, what it finds, and how it explains it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import edgefl
from edgefl.cli import app
from edgefl.errors import ConfigError
from edgefl.experiment.check import Laboratory, Schedule, check, draw
from edgefl.experiment.check.schedule import Late, Slow, Uneven
from edgefl.nodes import Faults
from edgefl.nodes.plan import Crash, Partition

HEAD = """
from dataclasses import dataclass
from edgefl.learning.work import LocalSGD
from edgefl.nodes import Check, Faults, Gone, Message, Method
from edgefl.parameters import Vector

@dataclass(frozen=True)
class Model(Message):
    stale_by = "round"
    round: int
    parameters: Vector

def method(peer, **more):
    return Method(name="mine", title="", paper="", roles={"peer": peer}, messages=(Model,),
                  ends_with=("peer",), needs="complete", evaluates="each", **more)
"""
WAITS_FOR_ALL = """
async def peer(node):
    x = node.model.init()
    others = [j for j in node.fleet.ids() if j != node.id]
    for t in node.rounds():
        r = await node.compute(LocalSGD(x, node.data, t, node.workload))
        node.send(others, Model(t, r.parameters))
        for j in others:
            m = await node.receive(Model{gone}, sender=j, round=t)
        x = r.parameters
        node.publish(x, step=t + 1)
    return x

METHOD = method(peer, tolerates=Faults(crashes={crashes}))
"""
SPINS = """
async def peer(node):
    x = node.model.init()
    for t in node.rounds():
        await node.compute(LocalSGD(x, node.data, t, node.workload))
        node.publish(x, step=t + 1)
    others = [j for j in node.fleet.ids() if j != node.id]
    if not all(node.fleet.alive(j) for j in others):
        while True:
            m = await node.receive(Model, Gone, sender=others)

METHOD = method(peer, tolerates=Faults(crashes=True))
"""
DIVERGES = """
async def peer(node):
    x = node.model.init()
    for t in node.rounds():
        r = await node.compute(LocalSGD(x, node.data, t, node.workload))
        living = sum(node.fleet.alive(j) for j in node.fleet.ids()) - len(node.fleet.ids())
        x = r.parameters * (1.0 if living == 0 else float("inf"))
        node.publish(x, step=t + 1)
        await node.sleep(0.01)
    return x

METHOD = method(peer, tolerates=Faults(crashes=True))
"""
FAILS = """
async def peer(node):
    x = node.model.init()
    for t in node.rounds():
        r = await node.compute(LocalSGD(x, node.data, t, node.workload))
        if node.life > 0:
            raise RuntimeError("a second life was not thought of")
        node.publish(x, step=t + 1)
    return x

METHOD = method(peer, tolerates=Faults(returns=True))
"""
BREAKS = """
async def peer(node):
    x = node.model.init()
    for t in node.rounds():
        r = await node.compute(LocalSGD(x, node.data, t, node.workload))
        node.publish(x, step=t + 1)
    return x

def all_return(outcome):
    return len(outcome.results) == 8 or f"{8 - len(outcome.results)} are missing"

METHOD = method(peer, tolerates=Faults(crashes=True), invariants=(Check("all eight return", all_return),))
"""


def written(folder: Path, body: str, **words: object) -> str:
    path = folder / "mine.py"
    for word, value in words.items():
        body = body.replace("{" + word + "}", str(value))
    path.write_text(HEAD + body)
    return str(path)


def only_crashes(schedule: Schedule) -> bool:
    return len(schedule.faults) == 1 and isinstance(schedule.faults[0], Crash)


def test_a_method_that_waits_for_the_dead_hangs_and_one_crash_is_enough(tmp_path):
    found = check(Laboratory(written(tmp_path, WAITS_FOR_ALL, gone="", crashes=True)), range(50))
    finding = found.finding
    assert finding is not None and finding.shortest.verdict.kind == "hangs"
    assert "waits for Model from" in finding.shortest.verdict.detail
    assert only_crashes(finding.shortest.schedule)
    assert len(finding.trial.schedule.faults) >= 1
    seed = finding.trial.schedule.seed
    assert finding.replay == f"edgefl check {tmp_path / 'mine.py'} --seed {seed}"
    again = check(Laboratory(str(tmp_path / "mine.py")), [seed])
    assert again.finding is not None and again.finding.shortest == finding.shortest


def test_the_same_method_outlives_what_it_says_it_does_and_with_gone_also_crashes(tmp_path):
    modest = check(Laboratory(written(tmp_path, WAITS_FOR_ALL, gone="", crashes=False)), range(30))
    assert modest.finding is None and len(modest.trials) == 30 and modest.tolerated == ("delays",)
    (tmp_path / "b").mkdir()
    mended = check(Laboratory(written(tmp_path / "b", WAITS_FOR_ALL, gone=", Gone", crashes=True)), range(30))
    assert mended.finding is None and mended.tolerated == ("crashes", "delays")


@pytest.mark.parametrize(
    ("body", "kind", "detail"),
    [
        (SPINS, "fails", "takes messages at one instant without end"),
        (DIVERGES, "diverges", "a model that is not finite"),
        (FAILS, "fails", "RuntimeError: a second life was not thought of"),
        (BREAKS, "breaks", "all eight return: 1 are missing"),
    ],
)
def test_each_way_to_fail_is_told_apart_and_explained_by_one_crash(tmp_path, body, kind, detail):
    finding = check(Laboratory(written(tmp_path, body)), range(60)).finding
    assert finding is not None
    assert finding.shortest.verdict.kind == kind and detail in finding.shortest.verdict.detail
    assert only_crashes(finding.shortest.schedule)


def test_a_run_that_goes_on_for_ever_is_ended_by_the_bound(tmp_path):
    body = """
async def peer(node):
    while True:
        await node.sleep(1000.0)

METHOD = method(peer)
"""
    found = check(Laboratory(written(tmp_path, body)), range(5))
    assert found.finding is not None and found.finding.trial.verdict.kind == "hangs"
    assert (
        "peer 0" in found.finding.trial.verdict.detail
        and "1000 s to pass" in found.finding.trial.verdict.detail
    )
    assert found.finding.shortest.schedule.faults == ()


def test_a_seed_draws_one_schedule_and_runs_one_way():
    laboratory = Laboratory("fedavg")
    for seed in range(5):
        assert laboratory.schedule(seed) == laboratory.schedule(seed)
        assert laboratory.trial(laboratory.schedule(seed)) == laboratory.trial(laboratory.schedule(seed))
    assert len({laboratory.schedule(seed) for seed in range(20)}) > 15


def kinds(tolerates: Faults) -> set[str]:
    """What 300 schedules hold."""
    laboratory = Laboratory("d-psgd")
    found = set()
    for seed in range(300):
        for fault in draw(seed, laboratory.plan, tolerates, 1.0).faults:
            silent = isinstance(fault, Crash) and fault.silent
            back = isinstance(fault, Crash) and fault.down_s is not None
            found.add("silent" if silent else "back" if back else type(fault).__name__)
    return found


@pytest.mark.parametrize(
    ("tolerates", "expected"),
    [
        (Faults(delays=False), set()),
        (Faults(), {"Slow", "Late", "Uneven"}),
        (Faults(crashes=True, delays=False), {"Crash"}),
        (Faults(returns=True, delays=False), {"back"}),
        (Faults(partitions=True, delays=False), {"Partition"}),
        (Faults(silence=True, delays=False), {"silent"}),
        (
            Faults(crashes=True, returns=True, partitions=True, delays=True, silence=True),
            {"Crash", "back", "silent", "Partition", "Slow", "Late", "Uneven"},
        ),
    ],
)  # fmt: skip
def test_only_what_is_tolerated_is_drawn_and_all_of_it(tolerates, expected):
    assert kinds(tolerates) == expected


def test_a_server_and_half_of_the_clients_never_go_for_good():
    plan = Laboratory("fedavg").plan
    for seed in range(300):
        schedule = draw(seed, plan, Faults(crashes=True, returns=True), 1.0)
        gone = [f.node for f in schedule.faults if isinstance(f, Crash) and f.down_s is None]
        assert 0 not in gone and len(gone) == len(set(gone)) <= 4


def test_a_schedule_changes_the_plan_as_it_says():
    plan = Laboratory("d-psgd").plan
    faults = (
        Slow(1, 3.0),
        Late(2, 0.25, 0.5),
        Uneven(0.2),
        Crash(3, 1.0),
        Partition(frozenset({0}), 1.0, 2.0),
    )
    schedule = Schedule(7, faults, detect_s=0.125)
    disturbed = schedule.applied(plan)
    assert disturbed.seed == 7
    assert [spec.slowdown for spec in disturbed.nodes[:3]] == [1.0, 3.0, 1.0]
    assert (disturbed.network.access[2].latency_s, disturbed.network.access[2].jitter) == (0.25, 0.5)
    assert disturbed.network.access[1] == plan.network.access[1]
    assert disturbed.faults.crashes == (faults[3],) and disturbed.faults.partitions == (faults[4],)
    assert (disturbed.faults.detect_s, disturbed.faults.compute_jitter) == (0.125, 0.2)
    assert schedule.describe(plan) == [
        "peer 1 (raspberry-pi-4b) works 3 times slower",
        "peer 2 (raspberry-pi-4b) has a latency of 0.25 s, jitter 0.5",
        "work takes an uneven time (deviation 0.2)",
        "peer 3 (jetson-nano) dies at 1 s for good",
        "nodes 0 are cut off at 1 s for 2 s",
        "a death is noticed after 0.125 s",
    ]


def test_an_experiment_file_is_checked_as_it_is(tmp_path):
    text = """
[method]
name = "d-psgd"
[fleet]
devices = { laptop = 3 }
[data]
name = "synthetic"
num_owners = 3
examples_per_owner = 40
[model]
name = "linear"
[stop]
time_s = 3.0
"""
    (tmp_path / "mine.toml").write_text(text)
    laboratory = Laboratory(str(tmp_path / "mine.toml"), ["fleet.devices={laptop = 4}"])
    assert len(laboratory.plan.nodes) == 4 and laboratory.plan.rounds == 5
    assert laboratory.undisturbed.kind == "finished"
    assert check(laboratory, range(3)).finding is None


def test_the_same_from_python():
    report = edgefl.check("d-psgd", 3, train__local_steps=1)
    assert report.method == "d-psgd" and report.finding is None and len(report.trials) == 3
    assert [t.schedule.seed for t in edgefl.check("d-psgd", seed=5).trials] == [5]


def call(*arguments: str):
    return CliRunner().invoke(app, ["check", *arguments])


def test_the_command_says_what_it_has_done(tmp_path):
    result = call("fedavg", "--seeds", "4", "--quiet")
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "fedavg: 4 schedules of faults (crashes, returns, partitions, delays): 4 fin"
    )


def test_the_command_explains_a_failure_and_exits_with_1(tmp_path):
    path = written(tmp_path, FAILS)
    result = call(path, "--quiet")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "fails: peer" in lines[0] and "a second life was not thought of" in lines[0]
    assert any("dies at" in line and "returns" in line for line in lines)
    assert lines[-1].startswith(f"again: edgefl check {path} --seed ")
    again = call(path, "--seed", lines[-1].rsplit(" ", 1)[1], "--quiet")
    assert again.stdout == result.stdout and again.exit_code == 1


def test_json_has_a_line_for_each_seed_and_one_for_the_finding(tmp_path):
    result = call(written(tmp_path, FAILS), "--json")
    *trials, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert [t["seed"] for t in trials] == list(range(len(trials)))
    assert {t["verdict"] for t in trials[:-1]} <= {"finished"} and trials[-1]["verdict"] == "fails"
    assert last["shortest"]["verdict"] == "fails" and last["replay"].endswith(f"--seed {trials[-1]['seed']}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fedavgg"], "did you mean 'fedavg'"),
        (["nothing.py"], "no such file"),
        (["nothing.toml"], "a readable file is needed"),
        (["fedavg", "--smoke"], "it goes with an experiment file"),
        (["fedavg", "--set", "method.fedavg.min_reports=0"], "min_reports"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_smoke_goes_with_a_file_only():
    with pytest.raises(ConfigError, match="--smoke"):
        Laboratory("fedavg", smoke=True)
