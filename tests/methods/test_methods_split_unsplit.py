"""Split training is unsplit training: every cut of every shipped model, both sides' optimisers included."""

from __future__ import annotations

import pytest
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
    run,
    trained,
    unsplit_by_one_client,
    with_cuts,
)
from toy import Watcher


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize(("method", "name"), one_client_cases())
def test_one_client_is_unsplit_training_at_every_cut(method, name, optimiser):
    for settings in cuts_of(method, name):
        plan = model_plan(method, name, train=OPTIMISERS[optimiser], **settings)
        assert near(run(plan).results[0], unsplit_by_one_client(plan)), settings


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", OWN_CUTS)
def test_with_a_client_at_each_cut_a_round_is_that_of_whole_models(method, name, optimiser, monkeypatch):
    """The first client is cut after the first block, the last one holds the whole model."""
    cuts = list(range(1, BLOCKS[name] + 1))
    with_cuts(method, cuts, monkeypatch)
    plan, watcher = model_plan(method, name, len(cuts), train=OPTIMISERS[optimiser]), Watcher()
    w, fronts = each_its_cut(plan, cuts, personal=method == "hsfl")
    assert near(run(plan, watcher).results[0], w)
    if method == "hsfl":
        found = {node: model for node, _, _, model in watcher.models if node}
        assert all(near(found[k], front) for k, front in fronts.items())


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
