"""One file, three ways to run it: virtual time, gRPC in one process, gRPC with a process per node."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from edgefl.experiment.config import load_experiment
from edgefl.experiment.runner import run_experiment

FILE = """
name = "conformance"
seed = 3
[method]
name = "{method}"
[fleet]
devices = {{ raspberry-pi-4b = 2, laptop = 2 }}
[data]
name = "digits"
partition = {{ name = "dirichlet", alpha = 0.5, min_examples = 20 }}
[model]
name = "mlp"
hidden = [32]
[train]
local_steps = 2
momentum = 0.5
[stop]
rounds = 3
"""
SYNCHRONOUS = [
    "fedavg",
    "fedprox",
    "d-psgd",
    "ring-allreduce",
    "prague-static",
    "split-learning",
    "centralized",
    "local-only",
    "split-learning-u",
    "splitfed-v1",
    "splitfed-v2",
    "parallel-split",
    "edgesplit",
    "hsfl",
    "hsfl-layerwise",
    "dapple",
    "gpipe",
    "fednova",
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "median",
    "trimmed-mean",
    "krum",
    "multi-krum",
    "scaffold",
    "bsp",
    "hierarchical-fedavg",
    "choco-sgd",
    "fjord",
    "fedcore",
    "h-ring-psgd",
    "delay-by-one",
    "fixed-adacomm",
    "sgp",
]
ASYNCHRONOUS = ["fedasync", "ad-psgd", "divshare", "divshare-adpsgd", "divshare-swift", "swift", "prague"]
ASYNCHRONOUS += ["fedbuff", "ssp", "asyncdrop", "combo", "moshpit-sgd", "h-adpsgd", "adsp", "adacomm"]
SETTINGS = {
    "krum": ["method.krum.num_hostile=0"],
    "multi-krum": ["method.multi-krum.num_hostile=0"],
    "scaffold": ["method.scaffold.option=I"],  # II is for SGD without momentum
    # By the planned seconds, since the clock on the wall says others.
    "fedcore": [
        "model={name='linear'}",
        "train={local_epochs=3, momentum=0.5}",
        "method.fedcore.straggler_share=0.4",
        "method.fedcore.watch_clock=false",
        "method.fedcore.round_deadline_s=60.0",
    ],
}


def _run(tmp_path: Path, method: str, runtime: str, *, processes: bool = False, **overrides: str):
    file = tmp_path / f"{method}.toml"
    file.write_text(FILE.format(method=method))
    settings = [f"method.{method}.recipients=2"] if method.startswith("divshare") else []
    settings += ["model.hidden=[32, 16]"] if method == "split-learning-u" else []
    settings += SETTINGS.get(method, [])
    experiment = load_experiment(file, [*settings, *(f"{k}={v}" for k, v in overrides.items())])
    out = tmp_path / f"{method}-{runtime}-{processes}"
    return run_experiment(experiment, runtime=runtime, processes=processes, out=out)


def _traffic(folder: Path) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Messages and payload bytes by (sender, receiver, kind)."""
    with (folder / "traffic.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        (r["sender"], r["receiver"], r["kind"]): (r["messages"], r["payload_bytes"], r["encoded_bytes"])
        for r in rows
    }


def _model(folder: Path) -> torch.Tensor:
    tensors = load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def _assert_same(a: Path, b: Path) -> None:
    difference = (_model(a) - _model(b)).norm() / _model(a).norm()
    assert difference <= 1e-5
    assert _traffic(a) == _traffic(b)


@pytest.mark.parametrize("method", SYNCHRONOUS)
def test_a_synchronous_method_is_the_same_in_virtual_time_and_over_grpc(tmp_path, method):
    virtual = _run(tmp_path, method, "virtual")
    local = _run(tmp_path, method, "local")
    _assert_same(virtual.folder, local.folder)
    assert local.summary["status"] == virtual.summary["status"] == "finished"
    assert local.summary["final_accuracy"] == pytest.approx(virtual.summary["final_accuracy"], abs=0.01)


@pytest.mark.parametrize("model", ["{name='mlp', hidden=[32]}", "{name='cnn', channels=[4, 8], hidden=16}"])
def test_coresets_by_gradients_are_the_same_over_grpc(tmp_path, model):
    """Of models of several layers coresets hang on the parameters; stragglers train on them in all rounds."""
    virtual, local = (_run(tmp_path, "fedcore", r, model=model).folder for r in ("virtual", "local"))
    _assert_same(virtual, local)
    cores = [_num_coresets(folder) for folder in (virtual, local)]
    assert cores[0] == cores[1] >= 3


def test_taught_corners_are_the_same_over_grpc(tmp_path):
    settings = {"method.fjord.distillation_alpha": "0.5", "method.fjord.distillation_temperature": "2.0"}
    _assert_same(*(_run(tmp_path, "fjord", r, **settings).folder for r in ("virtual", "local")))


def _num_coresets(folder: Path) -> int:
    with (folder / "spans.csv").open() as file:
        return sum(row["detail"].startswith("SelectCoreset") for row in csv.DictReader(file))


@pytest.mark.parametrize(
    ("method", "name"), [("fedavg", "top-k"), ("fedavg", "qsgd"), ("fjord", "top-k"), ("fjord", "qsgd")]
)
def test_compressed_updates_are_the_same_over_grpc(tmp_path, method, name):
    settings = {"compress.name": name, "compress.fraction": "0.05"}
    _assert_same(*(_run(tmp_path, method, r, **settings).folder for r in ("virtual", "local")))


@pytest.mark.parametrize("method", ["asyncdrop", "adsp"])
def test_compressed_updates_of_whoever_comes_first_train_over_grpc(tmp_path, method):
    local = _run(tmp_path, method, "local", **{"compress.name": "top-k", "compress.fraction": "0.05"})
    assert local.summary["status"] == "finished" and torch.isfinite(_model(local.folder)).all()
    assert "refused" not in (local.folder / "events.csv").read_text()


@pytest.mark.parametrize("kind", ["sign-flip", "noise", "nan", "label-flip"])
def test_hostile_devices_do_the_same_over_grpc(tmp_path, kind):
    settings = {"faults.poison": f"{{share=0.25, kind='{kind}', scale=0.1}}"}
    virtual, local = (_run(tmp_path, "fedavg", r, **settings).folder for r in ("virtual", "local"))
    _assert_same(virtual, local)
    refused = [(f / "events.csv").read_text().count("it is not finite") for f in (virtual, local)]
    assert refused == ([3, 3] if kind == "nan" else [0, 0])


@pytest.mark.parametrize("method", ["fedavg", pytest.param("d-psgd", marks=pytest.mark.slow)])
def test_a_process_per_node_changes_nothing(tmp_path, method):
    virtual = _run(tmp_path, method, "virtual")
    local = _run(tmp_path, method, "local", processes=True)
    _assert_same(virtual.folder, local.folder)


@pytest.mark.parametrize("method", ASYNCHRONOUS)
def test_an_asynchronous_method_ends_with_a_finite_model_and_all_its_steps(tmp_path, method):
    local = _run(tmp_path, method, "local")
    assert local.summary["status"] == "finished"
    assert torch.isfinite(_model(local.folder)).all()
    assert local.summary["messages"] > 0
