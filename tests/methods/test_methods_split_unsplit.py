"""Split training is unsplit training: every cut of every shipped model, both sides' optimisers included."""

from __future__ import annotations

import pytest
from split_lab import CUTS, MODELS, model_plan, named_model, near, run, trained

ONE_CLIENT = ["split-learning", "splitfed-v1", "splitfed-v2", "parallel-split"]
OPTIMISERS = {
    "sgd": {},
    "momentum": {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3, "schedule": "cosine"},
    "adam": {"optimizer": "adam", "learning_rate": 0.01},
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_split_learning_is_unsplit_training(name, cut, optimiser):
    plan = model_plan("split-learning", name, cut=cut, train=OPTIMISERS[optimiser])
    assert near(run(plan).results[0], trained(plan, [(1, k) for k in range(6)]))


@pytest.mark.parametrize("name", [name for name in MODELS if len(named_model(name)[0].blocks) > 2])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_the_u_shape_is_unsplit_training_at_every_pair_of_cuts(name, optimiser):
    blocks = len(named_model(name)[0].blocks)
    for cut in range(1, blocks - 1):
        for head in range(1, blocks - cut):
            plan = model_plan(
                "split-learning-u", name, cut=cut, head_blocks=head, train=OPTIMISERS[optimiser]
            )
            assert near(run(plan).results[0], trained(plan, [(1, k) for k in range(6)])), (cut, head)


@pytest.mark.parametrize("method", ONE_CLIENT)
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet-batch", "char-lstm"])
def test_one_client_is_unsplit_sgd_in_every_method(method, name):
    plan = model_plan(method, name, cut=1)
    assert near(run(plan).results[0], trained(plan, [(1, k) for k in range(6)]))


@pytest.mark.parametrize("method", ["split-learning", "split-learning-u"])
def test_clients_in_turn_are_sgd_on_their_batches_in_that_order_with_momentum(method):
    plan = model_plan(method, "cnn", 3, cut=1, train={"momentum": 0.9})
    stream = [(k, 3 * t + s) for t in range(2) for k in (1, 2, 3) for s in range(3)]
    assert near(run(plan).results[0], trained(plan, stream))


def test_without_handover_each_turn_starts_with_a_fresh_optimiser_at_the_front():
    train = {"momentum": 0.9}
    kept = run(model_plan("split-learning", "mlp", 2, cut=1, train=train)).results[0]
    fresh = run(model_plan("split-learning", "mlp", 2, cut=1, train=train, handover_optimizer=False)).results[
        0
    ]
    plain = model_plan("split-learning", "mlp", 2, cut=1, handover_optimizer=False)
    assert not near(kept, fresh, 1e-4)
    assert near(
        run(plain).results[0],
        trained(plain, [(k, 3 * t + s) for t in range(2) for k in (1, 2) for s in range(3)]),
    )
