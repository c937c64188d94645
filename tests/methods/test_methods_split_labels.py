"""What leaves a client: the U shape sends no label, and no byte that could be one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from small import small_plan
from split_lab import model_plan, payload, run

from edgefl.errors import ConfigError
from edgefl.messages.codec import Codec
from edgefl.nodes.plan import Crash, FaultPlan

U = {"model": {"hidden": (32, 16)}, "cut": 1}


def sent_bytes(plan, monkeypatch):
    """Every message of a run as bytes, with its sender."""
    sent = []
    sizes = Codec.sizes

    def encode(codec, message):
        whole = codec.encode(message, (0,), 0)
        sent.append((message.sender, whole.header + b"".join(bytes(view) for view in whole.payload)))
        return sizes(codec, message)

    monkeypatch.setattr(Codec, "sizes", encode)
    run(plan)
    return sent


def marked_plan(method):
    """A plan whose labels are a pattern that nothing else looks like, in any integer or float type."""
    plan = small_plan(method, 2, rounds=2, train={"local_steps": 3}, **U)
    nodes = []
    for spec in plan.nodes:
        if spec.data is not None:
            y = (torch.arange(len(spec.data.dataset.y_train)) * 7) % 10
            dataset = dataclasses.replace(spec.data.dataset, y_train=y)
            spec = dataclasses.replace(spec, data=dataclasses.replace(spec.data, dataset=dataset))
        nodes.append(spec)
    return dataclasses.replace(plan, nodes=tuple(nodes))


def encodings(labels):
    """A batch's labels as they could travel: in any type, and in any of the orders that a slice may take."""
    kinds = (np.int64, np.int32, np.int16, np.uint8, np.float32, np.float64, np.float16)
    return [labels[:8].numpy().astype(kind).tobytes() for kind in kinds]


def leaks(plan, sent):
    """Messages of a client that hold eight labels in a row of one of its batches."""
    found = 0
    for k in (1, 2):
        for step in range(6):
            patterns = encodings(plan.nodes[k].data.batch(step, plan.nodes[k].workload.batch_size).y)
            found += sum(any(p in data for p in patterns) for sender, data in sent if sender == k)
    return found


def test_the_u_shape_sends_no_label_and_label_sharing_does(monkeypatch):
    plan = marked_plan("split-learning-u")
    sent = sent_bytes(plan, monkeypatch)
    assert {sender for sender, _ in sent} == {0, 1, 2} and len(sent) > 50
    assert leaks(plan, sent) == 0
    shared = marked_plan("split-learning")
    assert leaks(shared, sent_bytes(shared, monkeypatch)) >= 12


def test_bytes_of_the_u_shape():
    """Up 4 B (q + q2), down 4 B (q + q2); both ends go there and back once a turn, with their states."""
    rounds, clients, steps, B, q, q2 = 2, 3, 4, 16, 32, 16
    plan = small_plan(
        "split-learning-u", clients, rounds=rounds, train={"local_steps": steps, "momentum": 0.9}, **U
    )
    table = run(plan).traffic.table
    batches = rounds * clients * steps
    assert payload(table, "SmashedData") == payload(table, "SmashedGradient") == batches * 4 * B * q
    assert payload(table, "Features") == payload(table, "FeatureGradient") == batches * 4 * B * q2
    ends = 4 * (64 * 32 + 32) + 4 * (16 * 10 + 10)
    # The very first turn has no states yet.
    assert payload(table, "Ends") == (2 * rounds * clients * 2 - 1) * ends


def test_eight_bits_at_both_cuts_of_the_u_shape():
    exact = run(small_plan("split-learning-u", 2, rounds=2, **U))
    small = run(small_plan("split-learning-u", 2, rounds=2, cut_bits=8, **U))
    kinds = ("SmashedData", "Features", "FeatureGradient", "SmashedGradient")
    assert 3.9 < payload(exact.traffic.table, *kinds) / payload(small.traffic.table, *kinds) <= 4
    difference = (small.results[0].values - exact.results[0].values).norm()
    assert 0 < difference < 0.02 * exact.results[0].values.norm()


@pytest.mark.parametrize("at_s", [0.0, 0.0007, 0.0031, 0.0052])
def test_a_client_that_leaves_in_its_turn_is_passed_over_and_may_return(at_s):
    crashes = (Crash(1, at_s=at_s, down_s=0.003), Crash(2, at_s=at_s + 0.0004, down_s=0.0002))
    plan = small_plan("split-learning-u", 3, rounds=8, faults=FaultPlan(crashes=crashes, detect_s=0.001), **U)
    outcome = run(plan)
    assert outcome.status == "finished"
    assert outcome.traffic.table[0, 3, "Ends"][0] == 8
    assert torch.isfinite(outcome.results[0].values).all()


def test_cuts_that_leave_no_middle_are_refused():
    plan = small_plan("split-learning-u", 1, cut=1, model={"hidden": (8,)})
    with pytest.raises(ConfigError) as caught:
        plan.method.prepare(plan)
    assert str(caught.value) == (
        "method.split-learning-u.cut = 1: cut + head_blocks below 2, the number of mlp's blocks"
    )


def test_language_models_in_the_u_shape_keep_their_targets():
    plan = model_plan("split-learning-u", "transformer", cut=1)
    assert {k for _, _, k in run(plan).traffic.table} == {
        "Ends", "SmashedData", "Features", "FeatureGradient", "SmashedGradient",
    }  # fmt: skip
