"""Accuracy on each node's own mix of classes, held against predictions that are counted one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from experiment_files import small_file

from edgefl.experiment.build import Built, build
from edgefl.experiment.config import load_experiment
from edgefl.experiment.own_mix import own_mix_accuracy
from edgefl.experiment.runner import run_experiment
from edgefl.parameters import Vector


def built(folder: Path, method: str, *overrides: str) -> Built:
    overrides = ("data.partition={name='dirichlet', alpha=0.3}", *overrides)
    return build(load_experiment(small_file(folder), overrides, method=method))


def counted(run: Built, node: int, model: Vector) -> float:
    """Each of a node's examples counts the share of its class in the test set that the model knows."""
    scratch = run.learner.scratch(run.learner.model)
    scratch.load(model)
    right = scratch.forward(run.dataset.x_test, training=False).argmax(1) == run.dataset.y_test
    data = run.plan.nodes[node].data
    assert data is not None
    labels = data.dataset.y_train[torch.from_numpy(data.indices)]
    return sum(float(right[run.dataset.y_test == c].float().mean()) for c in labels) / len(labels)


def test_of_the_servers_model_and_of_personal_ones(tmp_path: Path) -> None:
    run = built(tmp_path, "fedavg")
    w, clients = run.learner.model.init(), run.plan.ids("client")
    expected = sum(counted(run, k, w) for k in clients) / len(clients)
    assert own_mix_accuracy(run, {0: w}) == pytest.approx(expected)
    run = built(tmp_path, "hsfl")
    own = {k: w * (1.0 - 0.7 * k) for k in clients}
    expected = sum(counted(run, k, own[k]) for k in clients) / len(clients)
    assert own_mix_accuracy(run, own) == pytest.approx(expected) != own_mix_accuracy(run, {0: w})
    some = {k: own[k] for k in clients[:2]}
    assert own_mix_accuracy(run, some) == pytest.approx(sum(counted(run, k, own[k]) for k in some) / 2)


def test_nothing_is_said_of_peers(tmp_path: Path) -> None:
    run = built(tmp_path, "d-psgd")
    assert own_mix_accuracy(run, {0: run.learner.model.init()}) is None


def test_a_run_says_it_in_its_summary(tmp_path: Path) -> None:
    experiment = load_experiment(small_file(tmp_path), ["stop.rounds=1"], method="hsfl")
    found = run_experiment(experiment, out=tmp_path / "run").summary
    assert 0 < found["own_mix_accuracy"] <= 1
