"""Split learning: unsplit SGD at every cut, clients in turn, and the bytes at the cut."""

from __future__ import annotations

import pytest
import torch
from methods_reference import batches, run, sgd
from small import small_plan

from edgefl.errors import ConfigError
from edgefl.nodes.plan import Crash, FaultPlan

DEEP = {"hidden": (32, 16)}


@pytest.mark.parametrize("cut", [1, 2])
def test_one_client_is_unsplit_sgd_at_every_cut(cut):
    plan = small_plan("split-learning", 1, rounds=3, model=DEEP, train={"local_steps": 4}, cut=cut)
    assert torch.equal(run(plan).results[0].values, sgd(plan, batches(plan, 1, range(12))))


@pytest.mark.parametrize(("cut", "head_blocks"), [(1, 1), (1, 2), (2, 1)])
def test_one_client_is_unsplit_sgd_to_the_bit_in_the_u_shape_too(cut, head_blocks):
    plan = small_plan(
        "split-learning-u", 1, rounds=3, model={"hidden": (32, 16, 8)}, train={"local_steps": 4},
        cut=cut, head_blocks=head_blocks,
    )  # fmt: skip
    assert torch.equal(run(plan).results[0].values, sgd(plan, batches(plan, 1, range(12))))


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_convolutional_model_is_unsplit_sgd_at_every_cut(cut):
    model = {"name": "cnn", "channels": (4, 8)}
    plan = small_plan("split-learning", 1, rounds=1, model=model, train={"local_steps": 3}, cut=cut)
    if cut >= len(plan.learner.model.blocks):
        with pytest.raises(ConfigError, match=r"split-learning\.cut"):
            plan.method.prepare(plan)
        return
    x = sgd(plan, batches(plan, 1, range(3)))
    assert torch.allclose(run(plan).results[0].values, x, rtol=0, atol=1e-6)


def test_clients_in_turn_are_sgd_on_their_batches_in_that_order():
    plan = small_plan("split-learning", 3, rounds=2, train={"local_steps": 2})
    stream = [b for t in range(2) for k in (1, 2, 3) for b in batches(plan, k, [2 * t, 2 * t + 1])]
    assert torch.equal(run(plan).results[0].values, sgd(plan, stream))


def test_momentum_goes_along_from_client_to_client():
    momentum = {"local_steps": 2, "momentum": 0.9}
    plan = small_plan("split-learning", 2, rounds=2, train=momentum)
    stream = [b for t in range(2) for k in (1, 2) for b in batches(plan, k, [2 * t, 2 * t + 1])]
    x, velocity = plan.learner.model.init(), plan.learner.optimizer.init(plan.learner.model.layout)
    for batch in stream:
        before = x
        g = before.with_values((before.values - sgd(plan, [batch], before.values)) / 0.1)
        x, velocity = plan.learner.optimizer.step(before, g, velocity, 0)
    assert torch.allclose(run(plan).results[0].values, x.values, rtol=0, atol=1e-5)


def test_bytes_at_the_cut_and_of_the_handover():
    """Up 4 B q and 4 bytes per label; down 4 B q; the front goes there and back once a turn."""
    rounds, clients, steps, B, q = 2, 3, 4, 16, 64
    plan = small_plan("split-learning", clients, rounds=rounds, train={"local_steps": steps, "batch_size": B})
    table = run(plan).traffic.table
    num_batches = rounds * clients * steps
    sent = {kind: sum(row[1] for (_, _, k), row in table.items() if k == kind) for _, _, kind in table}
    front = 64 * 64 + 64
    assert sent == {
        "SmashedData": num_batches * (4 * B * q + 4 * B),
        "SmashedGradient": num_batches * 4 * B * q,
        "Front": rounds * clients * 4 * front,
        "FrontBack": rounds * clients * 4 * front,
    }


def test_a_cut_outside_the_model_is_refused():
    plan = small_plan("split-learning", 1, cut=2)
    with pytest.raises(ConfigError) as caught:
        plan.method.prepare(plan)
    assert str(caught.value) == "method.split-learning.cut = 2: 1 to 1 for this model"


def test_a_client_that_leaves_in_its_turn_is_passed_over():
    plan = small_plan(
        "split-learning", 2, rounds=4, faults=FaultPlan(crashes=(Crash(1, at_s=0.004),), detect_s=0.01)
    )
    outcome = run(plan)
    assert outcome.status == "finished"
    assert outcome.traffic.table[0, 2, "Front"][0] == 4
