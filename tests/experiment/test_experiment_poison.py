"""[faults] poison and [compress] in an experiment file: who is hostile, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from experiment_files import small_file

from edgefl.errors import ConfigError
from edgefl.experiment.build import build
from edgefl.experiment.config import load_experiment


def nodes(tmp_path: Path, method: str, kind: str, share: float = 0.5):
    override = f"faults.poison={{share={share}, kind='{kind}', scale=2.0}}"
    return build(load_experiment(small_file(tmp_path), [override], method=method)).plan.nodes


def test_a_share_of_the_devices_is_hostile_and_the_same_ones_for_every_method(tmp_path: Path) -> None:
    fedavg, d_psgd = (nodes(tmp_path, m, "sign-flip") for m in ("fedavg", "d-psgd"))
    hostile = [i for i, spec in enumerate(fedavg) if spec.poison is not None]
    assert len(hostile) == 2 and 0 not in hostile
    assert [i + 1 for i, spec in enumerate(d_psgd) if spec.poison is not None] == hostile
    assert all(fedavg[i].poison.scale == 2.0 for i in hostile)


def test_flipped_labels_are_in_the_data_of_the_same_devices(tmp_path: Path) -> None:
    signs, labels = nodes(tmp_path, "fedavg", "sign-flip"), nodes(tmp_path, "fedavg", "label-flip")
    for sign, label in zip(signs[1:], labels[1:], strict=True):
        a, b = sign.data.take(sign.data.indices).y, label.data.take(label.data.indices).y
        assert torch.equal(b, a if sign.poison is None else 9 - a) and label.poison is None


def test_nobody_is_hostile_at_a_share_of_nothing(tmp_path: Path) -> None:
    assert all(spec.poison is None for spec in nodes(tmp_path, "fedavg", "noise", share=0.0))


def test_labels_cannot_be_flipped_where_there_are_none(tmp_path: Path) -> None:
    text = [
        "data={name='text', num_owners=4}",
        "model={name='char-lstm'}",
        "faults.poison={share=0.5, kind='label-flip'}",
    ]
    with pytest.raises(ConfigError, match="has no labels to flip") as caught:
        build(load_experiment(small_file(tmp_path), text))
    assert caught.value.key == "faults.poison.kind"


@pytest.mark.parametrize("method", ["d-psgd", "splitfed-v1", "ring-allreduce"])
def test_methods_that_do_not_compress_refuse_it(tmp_path: Path, method: str) -> None:
    with pytest.raises(ConfigError, match="does not send updates that can be compressed") as caught:
        build(load_experiment(small_file(tmp_path), ["compress.name=top-k"], method=method))
    assert caught.value.key == "compress.name"


def test_edges_are_nodes_beside_the_devices(tmp_path: Path) -> None:
    overrides = [
        "fleet.roles.edge=jetson-nano",
        "method.hierarchical-fedavg.num_edges=3",
        "network.link={edge='lte'}",
    ]
    plan = build(load_experiment(small_file(tmp_path), overrides, method="hierarchical-fedavg")).plan
    assert [spec.role for spec in plan.nodes] == ["server", *["edge"] * 3, *["client"] * 4]
    assert [spec.profile.name for spec in plan.nodes[1:4]] == ["jetson-nano"] * 3
    assert plan.network.access[1] == plan.network.access[3] != plan.network.access[4]


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "median", "scaffold", "fedprox", "fednova"])
def test_more_reports_than_are_asked_for_are_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(ConfigError, match="at most 4, the reports that a round of 4 clients wants") as caught:
        build(load_experiment(small_file(tmp_path), [f"method.{method}.min_reports=5"], method=method))
    assert caught.value.key == f"method.{method}.min_reports"
