"""Sub-models: sliced out exactly, merged back exactly, cheaper by what they leave out."""

from __future__ import annotations

import pytest
import torch
from learning_toys import IMAGE, dataset, local
from torch.nn import functional

from edgefl.errors import ConfigError
from edgefl.learning import Batched, Inline, Learner, LocalSGD, TrainConfig, Workload
from edgefl.learning.models import ModelConfig, Problem, build_model
from edgefl.learning.narrowing import unit_scores

IMAGES = Problem("classification", (1, 8, 8), 10)
MODELS = [
    {"name": "mlp", "hidden": (12,)},
    {"name": "mlp", "hidden": (12, 9)},
    {"name": "cnn", "channels": (4, 6), "hidden": 10},
    {"name": "vgg", "channels": (4, 6, 4), "pooled": (1, 3), "hidden": 8},
    {"name": "resnet", "channels": (4, 6), "blocks_per_group": 2, "norm": "none"},
]


def model_of(config, problem=IMAGES):
    return build_model(ModelConfig(**config), problem, seed=1)


def odd(model):
    """Every second unit of every set."""
    return {name: range(1, n, 2) for name, n in model.narrowing.counts.items()}


def scattered(model):
    x = model.init()
    values = torch.randn(x.layout.size, generator=torch.Generator().manual_seed(3)) * 0.3
    return x.with_values(values)


def masked(model, keep, x):
    """x with the rows of all dropped units set to zero, name by name: what does not fire does not count."""
    named = {name: t.clone() for name, t in x.named().items()}
    for name, axes in model.narrowing.axes.items():
        if axes and axes[0] is not None:
            gone = [i for i in range(model.narrowing.counts[axes[0]]) if i not in keep[axes[0]]]
            named[name][gone] = 0.0
    return x.with_values(torch.cat([named[e.name].reshape(-1) for e in x.layout.entries]))


def output_and_gradient(model, x, batch_x, batch_y):
    module = model.build()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(x.named()[name])
    output = module(batch_x)
    functional.cross_entropy(output, batch_y).backward()
    return output.detach(), torch.cat([p.grad.reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("config", MODELS, ids=lambda c: "-".join(map(str, c.values())))
def test_a_sliced_model_is_the_whole_one_with_its_other_units_silent(config):
    model = model_of(config)
    sub, x = model.narrow(odd(model)), scattered(model)
    data = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(4)), torch.arange(5)
    small, small_gradient = output_and_gradient(sub.model, sub.extract(x), *data)
    large, large_gradient = output_and_gradient(model, masked(model, sub.keep, x), *data)
    assert sub.model.layout.size == len(sub.index) < model.layout.size
    assert torch.allclose(small, large, atol=1e-5)
    assert torch.allclose(small_gradient, large_gradient[sub.index], atol=1e-5)


@pytest.mark.parametrize("config", MODELS, ids=lambda c: "-".join(map(str, c.values())))
def test_extract_then_merge_is_the_identity_and_touches_nothing_else(config):
    model = model_of(config)
    sub, x = model.narrow(odd(model)), scattered(model)
    part = sub.extract(x)
    assert sub.merge(x, part).equal(x)
    other = sub.merge(x, part.with_values(part.values + 1.0))
    outside = torch.ones(x.layout.size, dtype=torch.bool)
    outside[sub.index] = False
    assert torch.equal(other.values[outside], x.values[outside])
    assert torch.equal(other.values[sub.index], x.values[sub.index] + 1.0)
    half = sub.merge(x, part.with_values(part.values + 1.0), 0.5)
    assert torch.allclose(half.values[sub.index], x.values[sub.index] + 0.5)


def test_where_the_values_of_a_small_one_lie():
    """Two inputs, three hidden units, two outputs; unit 1 is dropped."""
    model = model_of({"name": "mlp", "hidden": (3,)}, Problem("classification", (2,), 2))
    sub = model.narrow({"hidden1": (2, 0)})
    assert sub.keep == {"hidden1": (0, 2)}
    assert sub.index.tolist() == [0, 1, 4, 5, 6, 8, 9, 11, 12, 14, 15, 16]


def test_residual_blocks_that_are_added_share_their_channels():
    model = model_of(MODELS[-1])
    assert model.narrowing.counts == {
        "stem": 4, "residual1.inner": 4, "residual2.inner": 4,
        "residual3.inner": 6, "residual3": 6, "residual4.inner": 6,
    }  # fmt: skip
    beside = {u.name: u.beside for u in model.narrowing.units}
    assert [beside[f"residual{i}.inner"] for i in (1, 2, 3, 4)] == ["stem", "stem", "residual3", "residual3"]


def test_one_shape_is_one_model_and_all_units_are_the_whole():
    model = model_of(MODELS[1])
    a, b = model.narrow({"hidden1": range(6)}), model.narrow({"hidden1": range(6, 12)})
    assert a.model is b.model and not torch.equal(a.index, b.index)
    whole = model.narrow({})
    assert whole.model is model and torch.equal(whole.index, torch.arange(model.layout.size))


def test_half_a_convolution_costs_a_quarter():
    model = model_of({"name": "cnn", "channels": (8, 16)})
    sub = model.narrow({"conv1": range(4), "conv2": range(8)})
    whole, half = model.block_counts[1], sub.model.block_counts[1]
    assert half.forward_flops * 4 == whole.forward_flops
    assert sub.model.block_counts[0].forward_flops * 2 == model.block_counts[0].forward_flops


def test_what_cannot_be_narrowed_says_which_block_and_why():
    with pytest.raises(ConfigError, match=r"model\.norm = 'group': block stem can be narrowed"):
        model_of({"name": "resnet"}).narrow({})
    with pytest.raises(ConfigError, match=r"its block embedding .* cannot be narrowed"):
        model_of({"name": "char-lstm"}, Problem("language", (12,), 20)).narrow({})
    model = model_of(MODELS[0])
    with pytest.raises(ValueError, match="no units 'hidden'; it has hidden1"):
        model.narrow({"hidden": (1,)})
    for units in ((), (1, 1), (-1,), (12,)):
        with pytest.raises(ValueError, match="some of its 12 units are needed"):
            model.narrow({"hidden1": units})
    with pytest.raises(ValueError, match="is a stage"):
        model.stage(0, 1).narrow({})


def test_how_much_a_unit_moved_counts_its_rows_and_columns():
    model = model_of({"name": "mlp", "hidden": (3,)}, Problem("classification", (2,), 2))
    change = model.init().with_values(torch.arange(17.0) - 8)
    # Unit 0: weights 0, 1 of its row at -8, -7, and its column at places 9 and 12.
    assert unit_scores(model.narrowing, change.named(), "hidden1").tolist() == [20.0, 18.0, 16.0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_narrow_models_of_one_shape_train_together_as_one_by_one(momentum):
    data = dataset(*IMAGE)
    parts = [local(data, 20 + i, node=i) for i in range(4)]
    model = build_model(ModelConfig(name="mlp", hidden=(12,)), data, seed=1)
    learner = Learner(model, TrainConfig(momentum=momentum))
    works = []
    for i, part in enumerate(parts):
        sub = model.narrow({"hidden1": range(i, i + 8)} if i < 3 else {})
        start = sub.extract(model.init())
        works.append(LocalSGD(start, part, 0, Workload(batch_size=8, steps=3), model=sub.model))
    batched = Batched(learner)
    keys = [batched.group_key(w) for w in works]
    assert len(set(keys[:3])) == 1 and keys[3] not in keys[:3]
    for one, other in zip(batched.run(works), Inline(learner).run(works), strict=True):
        assert torch.allclose(one.parameters.values, other.parameters.values, atol=1e-6)
    narrow, whole = works[0].cost(learner), works[3].cost(learner)
    assert narrow.flops < 0.8 * whole.flops and narrow.model != whole.model
