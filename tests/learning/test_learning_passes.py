"""Passes through stacks of dense layers: compiled as written, and blind to company."""

from __future__ import annotations

import pytest
import torch
from learning_toys import IMAGE, dataset, local, mlp

from edgefl.learning import Batched, Learner, LocalSGD, TrainConfig, Trained, Workload, passes

G, B, D, U, K, S = 5, 7, 6, 9, 4, 3
RELUS = [True, False]


def models(count=G):
    torch.manual_seed(1)
    weights = [torch.randn(G, U, D), torch.randn(G, K, U)]
    biases = [torch.randn(G, U), torch.randn(G, K)]
    return [t[:count].clone() for t in weights], [t[:count].clone() for t in biases]


def batches(regression, count=G):
    torch.manual_seed(2)
    x, move = torch.randn(S, G, B, D), -torch.rand(S, G, B) / B
    y = torch.randn(S, G, B, K) if regression else torch.randint(0, K, (S, G, B))
    return x[:, :count].clone(), y[:, :count].clone(), move[:, :count].clone()


@pytest.mark.parametrize("regression", [False, True])
def test_compiled_passes_are_the_written_ones_bit_for_bit(regression):
    active = [5, 5, 2]
    found = []
    for descend in (passes.descend, *(passes.compiled().descend for _ in range(3))):  # the third is optimised
        weights, biases = models()
        losses = descend(weights, biases, RELUS, regression, *batches(regression), active)
        found.append((losses, *weights, *biases))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("regression", [False, True])
def test_a_step_is_autograds(regression):
    weights, biases = models()
    x, y, move = batches(regression)
    losses = passes.descend(weights, biases, RELUS, regression, x[:1], y[:1], move[:1], [G])
    before, before_b = models()
    for g in range(G):
        own = [t[g].requires_grad_() for t in (*before, *before_b)]
        output = torch.relu(x[0, g] @ own[0].T + own[2]) @ own[1].T + own[3]
        if regression:
            each = (output - y[0, g]).square().mean(1)
        else:
            each = torch.nn.functional.cross_entropy(output, y[0, g], reduction="none")
        moves = torch.autograd.grad((each * move[0, g]).sum(), own)
        after = (weights[0][g], weights[1][g], biases[0][g], biases[1][g])
        for old, change, new in zip(own, moves, after, strict=True):
            torch.testing.assert_close(old.detach() + change, new, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(losses[0, g], each.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [1, 2, 3, 50])
def test_results_of_equal_batches_do_not_depend_on_the_group(group):
    data = dataset(*IMAGE)
    model = mlp(data)
    learner = Learner(model, TrainConfig())
    works = [LocalSGD(model.init(), local(data, 16, i), i, Workload(batch_size=4)) for i in range(6)]
    whole = Batched(learner, 6).run(works)
    for a, b in zip(whole, Batched(learner, group, 2).run(works), strict=True):
        assert isinstance(a, Trained) and isinstance(b, Trained)
        if group > 1:
            assert a.parameters.equal(b.parameters) and a.loss == b.loss
        torch.testing.assert_close(a.parameters.values, b.parameters.values, rtol=1e-5, atol=1e-6)


def test_what_a_group_trained_knows_its_norm():
    data = dataset(*IMAGE)
    model = mlp(data)
    works = [LocalSGD(model.init(), local(data, 9, i), 0, Workload(batch_size=4)) for i in range(3)]
    for found in Batched(Learner(model, TrainConfig())).run(works):
        assert isinstance(found, Trained)
        vector = found.parameters
        fresh = float(torch.linalg.vector_norm(vector.values))
        assert vector._norm is not None and vector.norm() == pytest.approx(fresh, rel=1e-6)
        assert (vector * 2).norm() == pytest.approx(2 * fresh, rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_group_makes_the_models_that_it_trains_from(momentum, workers):
    data = dataset(*IMAGE)
    model = mlp(data)
    learner = Learner(model, TrainConfig(momentum=momentum))
    start = [model.init() * (1 + i) for i in range(4)]

    def put_off():
        return [start[i] + (start[i] - start[i - 1]) for i in range(4)]

    def trained(models):
        works = [LocalSGD(x, local(data, 16, i), 0, Workload(batch_size=4)) for i, x in enumerate(models)]
        return [promise.result() for promise in Batched(learner, 4, workers).start(works)]

    models, made = put_off(), put_off()
    assert all(x.values is not None and x.depth == 0 for x in made) and all(x.depth == 2 for x in models)
    for a, b in zip(trained(models), trained(made), strict=True):
        assert isinstance(a, Trained) and isinstance(b, Trained)
        assert a.parameters.equal(b.parameters) and a.loss == b.loss
    assert all(x.depth == 0 and x.equal(y) for x, y in zip(models, made, strict=True))
