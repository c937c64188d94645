"""Coresets: medoids of gradients at the last layer, weights that stand for all, and training on them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from learning_toys import IMAGE, dataset, local, mlp, named_model, near
from torch.nn import functional

from edgefl.data import LocalData, WeightedData
from edgefl.learning import Batched, Inline, Learner, LocalSGD, TrainConfig, Workload
from edgefl.learning.coreset import SelectCoreset, class_quotas, has_last_layer, last_layer, random_coreset
from edgefl.learning.learner import value_of
from edgefl.learning.medoids import build, counts, k_medoids, objective

CLASSIFIERS = ["mlp", "cnn", "resnet-group", "resnet-batch", "vgg"]


def points(n, seed, dims=3):
    x = np.random.default_rng(seed).standard_normal((n, dims))
    return np.sqrt(((x[:, None] - x) ** 2).sum(-1))


@pytest.mark.parametrize(("n", "k"), [(30, 1), (30, 4), (60, 20), (60, 59), (12, 12)])
def test_swaps_end_no_worse_than_greed_and_than_chance(n, k):
    for seed in range(5):
        distances = points(n, seed)
        rng = np.random.default_rng(seed)
        medoids = k_medoids(distances, k)
        assert len(set(medoids.tolist())) == k and (np.diff(medoids) > 0).all()
        found = objective(distances, medoids)
        assert found <= objective(distances, build(distances, k)) + 1e-12
        chance = [objective(distances, rng.choice(n, k, replace=False)) for _ in range(20)]
        assert found <= np.mean(chance) + 1e-12


def test_small_cases_mostly_end_at_the_exact_optimum():
    hits = 0
    for seed in range(200):
        distances = points(8, seed, dims=2)
        best = min(objective(distances, np.array(pair)) for pair in combinations(range(8), 2))
        hits += objective(distances, k_medoids(distances, 2)) <= best + 1e-12
    assert hits >= 160


def test_the_greedy_start_by_hand_and_ties_by_lowest_index():
    line = np.array([0.0, 1, 2, 10, 11])
    distances = np.abs(line[:, None] - line)
    assert build(distances, 2).tolist() == [2, 3]  # totals 24, 21, 20, 28, 32; then the gains 3, 3, 0, 17, 17
    assert k_medoids(distances, 2).tolist() == [1, 3]
    assert k_medoids(np.zeros((4, 4)), 2).tolist() == [0, 1]
    with pytest.raises(ValueError, match="1 to 4 medoids"):
        k_medoids(np.zeros((4, 4)), 5)


def test_of_two_points_that_have_only_each_other_rounding_does_not_choose():
    """Twelve pairs far apart, of which either point is as good a medoid."""
    rng = np.random.default_rng(3)
    places = np.repeat(rng.normal(scale=100.0, size=(12, 2)), 2, axis=0) + rng.normal(size=(24, 2))
    distances = np.sqrt(((places[:, None] - places) ** 2).sum(-1))
    medoids = k_medoids(distances, 12)
    assert sorted(medoids // 2) == list(range(12))
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(scale=1e-14, size=distances.shape)
        assert np.array_equal(k_medoids(distances * (1 + noise), 12), medoids)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_last_bits_of_the_parameters_do_not_choose(name):
    model, data = named_model(name)
    mine, learner = local(data, 30), Learner(model, TrainConfig())
    y = LocalSGD(model.init(), mine, 0, Workload(batch_size=8, steps=4)).run(learner).parameters
    base = SelectCoreset(y, mine, 12).run(learner)
    for seed in range(5):
        noise = 1e-7 * torch.randn(y.layout.size, generator=torch.Generator().manual_seed(seed))
        other = SelectCoreset(y.with_values(y.values * (1 + noise)), mine, 12).run(learner)
        assert np.array_equal(base.indices, other.indices) and np.array_equal(base.weights, other.weights)


def test_a_point_counts_for_its_nearest_medoid_a_duplicate_for_the_first_and_each_medoid_for_itself():
    line = np.array([5.0, 5, 5, 9, 8])
    distances = np.abs(line[:, None] - line)
    assert counts(distances, np.array([0, 2, 3])).tolist() == [2, 1, 2]


def select(name="mlp", m=30, size=12, **more):
    model, data = named_model(name)
    mine = local(data, m, 3)
    learner = Learner(model, TrainConfig())
    return learner, mine, SelectCoreset(model.init(), mine, size, **more)


@pytest.mark.parametrize("name", [*CLASSIFIERS, "linear"])
def test_gradients_at_the_last_layer_are_autograds(name):
    """Of every example by itself, in float64 where the layer is concerned."""
    learner, mine, work = select(name)
    found = last_layer(learner, work.parameters, mine)
    module = learner.scratch(learner.model).module
    vectors = found.vectors()
    batch = mine.take(mine.indices)
    if name == "linear":
        assert torch.equal(vectors, batch.x.flatten(1).double())
        return
    module.eval()
    with torch.no_grad():
        x = learner.scratch(learner.model).inputs(batch.x)
        for block in list(module)[:-1]:
            x = block(x)
    end = list(module)[-1].double()
    try:
        for j in range(len(mine)):
            loss = functional.cross_entropy(end(x[j : j + 1].double()), batch.y[j : j + 1])
            weight, bias = torch.autograd.grad(loss, [end.weight, end.bias])
            assert torch.allclose(vectors[j], torch.cat([bias, weight.flatten()]), rtol=0, atol=1e-6)
    finally:
        end.float()


@pytest.mark.parametrize("name", ["mlp", "linear"])
def test_distances_are_those_of_the_vectors_and_zero_for_duplicates(name):
    learner, mine, work = select(name)
    mine = LocalData(mine.dataset, np.append(mine.indices, mine.indices[:4]), mine.node, mine.seed)
    found = last_layer(learner, work.parameters, mine)
    rows = np.arange(2, len(mine))
    vectors = found.vectors()[torch.from_numpy(rows)]
    exact = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").numpy()
    distances = found.distances(rows)
    assert np.allclose(distances, exact, rtol=1e-6, atol=1e-6)
    assert distances[0, len(mine) - 2 - 2] == distances[1, len(mine) - 2 - 1] == 0.0  # examples 2 and 3


def test_quotas_are_the_classes_shares_rounded_up():
    labels = np.repeat([0, 1, 4], [50, 7, 1])
    assert class_quotas(labels, 10) == {0: 9, 1: 2, 4: 1}
    assert class_quotas(labels, 58) == {0: 50, 1: 7, 4: 1}
    assert class_quotas(labels, 10**6) == {0: 50, 1: 7, 4: 1}


@pytest.mark.parametrize("by", ["gradients", "inputs"])
@pytest.mark.parametrize("size", [1, 7, 15, 29])
def test_weights_of_a_class_sum_to_its_examples(size, by):
    learner, mine, work = select(size=size, by=by)
    for core in (work.run(learner), random_coreset(mine, size, np.random.default_rng(0))):
        labels = mine.dataset.y_train.numpy()
        assert size <= len(core.indices) <= size + 4
        assert (np.diff(core.indices) > 0).all() and np.isin(core.indices, mine.indices).all()
        assert (core.weights >= 1).all()
        for y in np.unique(labels[mine.indices]):
            assert core.weights[labels[core.indices] == y].sum() == pytest.approx(
                (labels[mine.indices] == y).sum()
            )


def test_a_coreset_of_all_is_all_with_weights_of_one():
    learner, mine, work = select(size=30)
    for core in (work.run(learner), random_coreset(mine, 30, np.random.default_rng(0))):
        assert core.indices.tolist() == sorted(mine.indices.tolist()) and (core.weights == 1).all()


def test_each_member_stands_for_those_that_are_nearest_to_it():
    learner, mine, work = select(size=8)
    core, labels = work.run(learner), mine.dataset.y_train.numpy()
    vectors = last_layer(learner, work.parameters, mine).vectors().numpy()
    of = dict(zip(mine.indices.tolist(), vectors, strict=True))
    stands = dict.fromkeys(core.indices.tolist(), 0)
    for j in mine.indices.tolist():
        same = [k for k in stands if labels[k] == labels[j]]
        stands[j if j in stands else min(same, key=lambda k: float(np.linalg.norm(of[j] - of[k])))] += 1
    assert list(stands.values()) == core.weights.tolist()


def test_training_on_weights_is_training_on_repeated_examples():
    data = dataset(*IMAGE)
    model = mlp(data)
    indices, weights = np.array([3, 8, 11, 20, 21]), np.array([2.0, 1, 4, 1, 3])
    core = WeightedData(data, indices, 0, 5, weights=weights)
    learner = Learner(model, TrainConfig(learning_rate=0.2))
    work = LocalSGD(model.init(), core, 1, Workload(batch_size=2, epochs=3))
    y, scratch = model.init().values.clone(), learner.scratch(model)
    for rows in core.batches(work.steps, 2):
        scratch.load(model.init().with_values(y))
        repeated = rows.repeat(weights[np.searchsorted(indices, rows)].astype(int))
        scratch.loss_and_gradient(LocalData(data, indices, 0, 5).take(repeated))
        y = y - 0.2 * value_of(scratch.gradient)
    trained = Inline(learner).run([work])[0]
    assert torch.allclose(trained.parameters.values, y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [IMAGE, ("regression", (3,), 2)], ids=["classification", "regression"])
def test_weighted_nodes_train_side_by_side_as_one_by_one(shape):
    data = dataset(*shape)
    model = mlp(data, 6, 5)
    learner = Learner(model, TrainConfig(momentum=0.5))
    rng = np.random.default_rng(2)

    def node(i, n):
        indices = np.sort(rng.choice(40, n, replace=False))
        core = WeightedData(data, indices, i, 3, weights=rng.integers(1, 9, n).astype(float))
        return LocalSGD(model.init(), core, i, Workload(batch_size=4, epochs=2))

    works = [node(i, n) for i, n in enumerate((5, 1, 16, 3, 11))]
    plain = LocalSGD(model.init(), local(data, 7), 0, Workload(batch_size=4, epochs=2))
    batched = Batched(learner)
    assert len({batched.group_key(w) for w in [*works, plain]}) == 1
    for found, alone in zip(batched.run([*works, plain]), Inline(learner).run([*works, plain]), strict=True):
        assert near(found.parameters, alone.parameters) and found.loss == pytest.approx(alone.loss, rel=1e-4)


def test_choosing_costs_a_pass_the_pairs_and_what_is_asked_per_pair():
    learner, mine, work = select(size=10)
    labels = mine.dataset.y_train.numpy()[mine.indices]
    pairs = sum(int((labels == y).sum()) ** 2 for y in np.unique(labels))
    cost = work.cost(learner)
    forward = len(mine) * learner.model.counts.forward_flops
    built = sum(int((labels == y).sum()) ** 2 * quota for y, quota in class_quotas(labels, 10).items())
    assert cost.flops == forward + pairs * 2 * (5 + 4) + 20 * built  # the last layer is 5 x 4
    larger = select(size=20)[2].cost(learner)
    assert larger.traffic_bytes > cost.traffic_bytes > forward / 2
    stated = select(size=10, seconds_per_pair=2e-6)[2].cost(learner)
    assert stated.seconds == pytest.approx(2e-6 * pairs)


def test_which_models_have_a_last_layer_to_go_by():
    assert all(has_last_layer(named_model(name)[0]) for name in CLASSIFIERS)
    assert not any(has_last_layer(named_model(n)[0]) for n in ("mlp-regression", "char-lstm", "transformer"))
