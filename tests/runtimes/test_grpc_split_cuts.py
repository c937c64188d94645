"""Split training over real gRPC is unsplit training, at every cut of the shipped models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from small import small_plan
from toy import Watcher, access

sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
from split_lab import CUTS, MODELS, model_plan, named_model, near, trained
from test_methods_dapple import unsplit

from edgefl.experiment.config import load_experiment
from edgefl.experiment.runner import run_experiment
from edgefl.learning.executors import Inline
from edgefl.runtimes.grpc.local import run_here

QUICK = [(name, cut) for name, cut in CUTS if name == "mlp"]
OTHERS = [pytest.param(name, cut, marks=pytest.mark.slow) for name, cut in CUTS if name != "mlp"]


class Recorder(Watcher):
    """An observer of a process: it has nothing to tell the others."""

    def export(self) -> dict[str, Any]:
        return {}

    def merge(self, rows: dict[str, Any]) -> None:
        """Nothing to take in."""


def over_grpc(plan: Any) -> Any:
    """All nodes in this process, each behind a port of its own: their results by node."""
    observers = [Recorder() for _ in plan.nodes]
    outcome = run_here(plan, observers, Inline(plan.learner), run_id="cuts", digest="cuts")
    return {node: parameters for node, (_, _, parameters) in outcome.last_models.items()} | outcome.results


@pytest.mark.parametrize(("name", "cut"), [*QUICK, *OTHERS])
def test_split_learning_over_grpc_is_unsplit_training_at_every_cut(name, cut):
    """Momentum on both sides, handed over from turn to turn."""
    plan = model_plan("split-learning", name, cut=cut, train={"momentum": 0.9, "weight_decay": 1e-3})
    assert near(over_grpc(plan)[0], trained(plan, [(1, k) for k in range(6)]))


@pytest.mark.parametrize(
    ("name", "cut"), [*QUICK, *(case for case in OTHERS if "batch" not in str(case.values[0]))]
)
def test_a_pipeline_over_grpc_is_unsplit_training_at_every_cut(name, cut):
    blocks = len(named_model(name)[0].blocks)
    plan = model_plan("dapple", name, 2, stages=((cut, 1), (blocks, 1)), train={"momentum": 0.9})
    results = over_grpc(plan)
    assert near(plan.learner.model.join(results[0], results[1]), unsplit(plan, 6))


def test_the_lead_waits_for_the_last_model_on_a_slow_line():
    """40 kB at 40 kB/s: the report of the process, which is small, would be there a second earlier."""
    plan = small_plan(
        "dapple", 2, rounds=1, model={"hidden": (16, 500)}, stages=((1, 1), (3, 1)),
        train={"local_steps": 1}, access=access(5e4),
    )  # fmt: skip
    observers = [Recorder() for _ in plan.nodes]
    outcome = run_here(plan, observers, Inline(plan.learner), run_id="last", digest="last", emulate=True)
    assert outcome.last_models[1][1] == 1
    assert outcome.last_models[1][2].layout == plan.learner.model.stage(1, 3).layout


@pytest.mark.slow
@pytest.mark.parametrize("method", ["splitfed-v1", "splitfed-v2", "parallel-split", "split-learning-u"])
@pytest.mark.parametrize("name", [name for name in MODELS if len(named_model(name)[0].blocks) > 2])
def test_every_method_over_grpc_with_one_client_is_unsplit_sgd(method, name):
    plan = model_plan(method, name, cut=1)
    assert near(over_grpc(plan)[0], trained(plan, [(1, k) for k in range(6)]))


DIGITS, TEXT = (
    'name = "digits"\nnum_train = 60\nnum_test = 40',
    'name = "text"\nnum_train = 60\nnum_test = 40',
)
IN_PROCESSES = {
    "mlp": (DIGITS, "hidden = [16, 8]"),
    "cnn": (DIGITS, "channels = [4, 8]"),
    "resnet": (DIGITS, "channels = [4, 8]"),
    "vgg": (DIGITS, "channels = [4, 8]\npooled = [2]\nhidden = 16"),
    "char-lstm": (TEXT, "hidden = 8"),
    "transformer": (TEXT, "width = 8\nheads = 2"),
}
"""Data and settings of each model, small."""


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_with_a_process_per_node_each_model_ends_where_virtual_time_does(name, tmp_path):
    data, model = IN_PROCESSES[name]
    file = tmp_path / "experiment.toml"
    file.write_text(f"""
[method]
name = "split-learning"
[method.split-learning]
cut = 2
[fleet]
devices = {{ laptop = 2 }}
[data]
{data}
[model]
name = "{name}"
{model}
[train]
batch_size = 8
local_steps = 3
momentum = 0.9
[stop]
rounds = 2
""")
    here = run_experiment(load_experiment(file), out=tmp_path / "virtual").summary
    there = run_experiment(
        load_experiment(file), runtime="local", processes=True, out=tmp_path / "local"
    ).summary
    assert there["final_loss"] == pytest.approx(here["final_loss"], rel=1e-5)
