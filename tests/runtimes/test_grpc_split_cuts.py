"""Split training over real gRPC is unsplit training, at every cut of the shipped models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_pair import ProcessPair, Recorder
from small import small_plan
from toy import access

sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
from split_lab import (
    BLOCKS,
    MODELS,
    OPTIMISERS,
    OWN_CUTS,
    cuts_of,
    each_its_cut,
    model_plan,
    near,
    one_client_cases,
    unsplit_by_one_client,
    with_cuts,
    without_keys,
)
from test_methods_dapple import unsplit

from edgefl.experiment.config import load_experiment
from edgefl.experiment.runner import run_experiment
from edgefl.learning.executors import Inline
from edgefl.runtimes.grpc.local import run_here

BOTH = ("momentum", "adam")
SIZES = [pytest.param(name, marks=() if name == "mlp" else pytest.mark.slow) for name in MODELS]
CASES = [
    pytest.param(method, name, marks=() if name == "mlp" else pytest.mark.slow)
    for method, name in one_client_cases()
]


@pytest.fixture(scope="module")
def pair() -> Iterator[ProcessPair]:
    """Two processes for all of these runs."""
    found = ProcessPair()
    yield found
    found.close()


@pytest.mark.parametrize("optimiser", BOTH)
@pytest.mark.parametrize(("method", "name"), CASES)
def test_over_grpc_one_client_is_unsplit_training_at_every_cut(pair, method, name, optimiser):
    for settings in cuts_of(method, name):
        recipe = {"method": method, "name": name, "train": OPTIMISERS[optimiser], **settings}
        assert near(pair.run(recipe)[0], unsplit_by_one_client(model_plan(**recipe))), settings


@pytest.mark.parametrize("optimiser", BOTH)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("method", OWN_CUTS)
def test_over_grpc_with_a_client_at_each_cut_a_round_is_that_of_whole_models(
    pair, method, name, optimiser, monkeypatch
):
    """The server's process alone plans; all clients are in the other one."""
    cuts = list(range(1, BLOCKS[name] + 1))
    with_cuts(method, cuts, monkeypatch)
    recipe = {"method": method, "name": name, "num_clients": len(cuts), "train": OPTIMISERS[optimiser]}
    w, fronts = each_its_cut(model_plan(**recipe), cuts, personal=method == "hsfl")
    found = pair.run(recipe)
    assert near(found[0], w)
    if method == "hsfl":
        assert all(near(found[k], front) for k, front in fronts.items())


@pytest.mark.parametrize("optimiser", BOTH)
@pytest.mark.parametrize("name", [p for p in SIZES if "batch" not in str(p.values[0])])
@pytest.mark.parametrize("method", ["dapple", "gpipe"])
def test_over_grpc_a_pipeline_is_unsplit_training_at_every_cut(pair, method, name, optimiser):
    """Two stages with each of the cuts between them, and a stage for every block."""
    blocks = BLOCKS[name]
    pipelines = [((cut, 1), (blocks, 1)) for cut in range(1, blocks)]
    for stages in (*pipelines, tuple((block, 1) for block in range(1, blocks + 1))):
        recipe = {
            "method": method, "name": name, "num_clients": len(stages), "stages": stages,
            "train": OPTIMISERS[optimiser],
        }  # fmt: skip
        plan = model_plan(**recipe)
        results = pair.run(recipe)
        whole, expected = plan.learner.model.join(*(results[s] for s in range(len(stages)))), unsplit(plan, 6)
        if optimiser == "adam":
            whole, expected = without_keys(whole), without_keys(expected)
        assert near(whole, expected), stages


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
