import pytest
import torch
from learning_toys import ALL_MODELS, IMAGE, dataset, local, mlp, named_model, near
from safetensors.torch import save_file

from edgefl.data import Batch
from edgefl.errors import ConfigError
from edgefl.learning import (
    Gradient,
    Learner,
    ModelConfig,
    Problem,
    StageBackward,
    StageForward,
    TrainConfig,
    Workload,
    build_model,
)
from edgefl.learning.learner import Scratch
from edgefl.parameters import Vector


@pytest.mark.parametrize("name", ALL_MODELS)
def test_init_is_a_function_of_the_seed_and_leaves_torch_alone(name: str) -> None:
    before = torch.get_rng_state()
    one, other = named_model(name, seed=4)[0].init(), named_model(name, seed=5)[0].init()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert one.equal(named_model(name, seed=4)[0].init())
    assert not one.equal(other)


@pytest.mark.parametrize("name", ALL_MODELS)
def test_scratch_round_trip(name: str) -> None:
    model, _ = named_model(name)
    layout = model.layout
    values = torch.arange(layout.size, dtype=torch.float32)
    buffers = tuple(torch.full(b.shape, 7).to(b.dtype) for b in layout.buffers)
    vector = Vector(layout, values, buffers)
    scratch = Scratch(model, torch.device("cpu"))
    scratch.load(vector)
    assert scratch.vector().equal(vector)
    named = vector.named()
    for key, tensor in scratch.module.state_dict().items():
        assert torch.equal(tensor, named[key]), key


def test_batch_norm_has_integer_counters_of_no_dimension() -> None:
    model, _ = named_model("resnet-batch")
    counters = [b for b in model.init().buffers if not b.is_floating_point()]
    assert counters and all(c.dtype is torch.int64 and c.shape == () for c in counters)


def cuts() -> list[tuple[str, int]]:
    return [(n, cut) for n in ALL_MODELS for cut in range(1, len(named_model(n)[0].blocks))]


@pytest.mark.parametrize(("name", "cut"), cuts())
def test_split_gradient_is_the_unsplit_one(name: str, cut: int) -> None:
    model, data = named_model(name)
    # Away from the start, where norm-free residual branches are zero.
    start = model.init()
    start = start.with_values(start.values + 0.1 * torch.sin(torch.arange(model.layout.size)))
    learner, mine = Learner(model, TrainConfig()), local(data, 6)
    whole = Gradient(start, mine, 0, Workload(batch_size=6)).run(learner)
    batch: Batch = mine.batch(0, 6)

    last = len(model.blocks)
    front, back = model.stage(0, cut), model.stage(cut, last)
    w_front, w_back = model.cut(start, 0, cut), model.cut(start, cut, last)
    smashed = StageForward(front, w_front, batch.x).run(learner)
    assert smashed.shape[1:] == back.input_shape
    behind = StageBackward(back, w_back, smashed, labels=batch.y).run(learner)
    before = StageBackward(front, w_front, batch.x, behind.input, input_gradient=False).run(learner)
    assert before.input is None
    assert behind.loss == pytest.approx(whole.loss, rel=1e-5)
    assert near(model.join(before.parameters, behind.parameters), whole.gradient)


def test_stages_are_contiguous_and_cached() -> None:
    model, _ = named_model("resnet-batch")
    last = len(model.blocks)
    assert model.stage(0, last) is model
    assert model.stage(1, 3) is model.stage(1, 3)
    assert model.stage(1, last).stage(1, 2) is model.stage(2, 3)
    start = model.init()
    for cut in range(1, last):
        parts = model.cut(start, 0, cut), model.cut(start, cut, last)
        assert model.join(*parts).equal(start)
        assert model.stage(cut, last).init().equal(parts[1])
        assert torch.equal(start[model.block_slice(cut, last)], parts[1].values)
        assert [e.name for p in parts for e in p.layout.entries] == [e.name for e in start.layout.entries]
    with pytest.raises(ValueError, match="blocks 2:2"):
        model.stage(2, 2)


def test_he_normal_weights_and_zero_biases() -> None:
    model = build_model(ModelConfig(name="linear"), Problem("classification", (400,), 100), 0)
    tensors = model.init().named()
    assert float(tensors["output.weight"].std()) == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    assert not tensors["output.bias"].any()


def test_norm_free_network_starts_as_its_shortcuts() -> None:
    model, _ = named_model("resnet-none")
    tensors = model.init().named()
    assert not tensors["residual1.conv2.weight"].any()
    assert tensors["residual1.conv1.weight"].any()
    assert tensors["residual1.scale.value"].tolist() == [1.0]


def test_operations_of_a_perceptron_by_hand() -> None:
    model = mlp(dataset(*IMAGE), 6)  # 64 -> 6 -> 4
    counts = model.counts
    assert counts.forward_flops == 2 * (64 * 6 + 6 * 4)
    assert counts.backward_flops == 2 * (64 * 6 + 2 * 6 * 4)
    assert counts.input_gradient_flops == 2 * 64 * 6
    assert counts.saved_bytes == 4 * (64 + 6)
    back = model.stage(1, 2).counts
    assert (back.forward_flops, back.backward_flops, back.input_gradient_flops) == (48, 48, 48)


def test_operations_of_convolution_and_lstm_by_hand() -> None:
    conv = named_model("cnn")[0].block_counts[0]
    assert conv.forward_flops == conv.first_backward_flops == 2 * 25 * 1 * 3 * 64
    assert conv.backward_flops == 2 * conv.first_backward_flops
    assert conv.output_shape == (3, 4, 4)
    lstm = named_model("char-lstm")[0].block_counts[1]
    assert lstm.forward_flops == 2 * 7 * 4 * 6 * (3 + 6)
    assert lstm.backward_flops == 2 * lstm.forward_flops
    assert lstm.first_backward_flops == 2 * 7 * 4 * 6 * (3 + 2 * 6)


def test_attention_looks_at_no_later_token() -> None:
    model, data = named_model("transformer")
    scratch = Scratch(model, torch.device("cpu"))
    scratch.load(model.init())
    x = data.x_train[:2].clone()
    with torch.no_grad():
        before = scratch.forward(x, training=False)
        x[:, 4] = (x[:, 4] + 1) % 5
        after = scratch.forward(x, training=False)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_load_starts_from_given_weights(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, data = named_model("resnet-batch", seed=1)
    saved = {name: t.clone() for name, t in model.init().named().items()}
    path = tmp_path / "weights.safetensors"
    save_file(saved, path)
    keys = ALL_MODELS["resnet-batch"][0]
    loaded = build_model(ModelConfig(**keys, load=str(path)), data, seed=2)
    assert loaded.init().equal(model.init())
    assert loaded.stage(1, 2).init().equal(model.cut(model.init(), 1, 2))

    save_file(saved | {"output.bias": torch.zeros(9)}, path)
    with pytest.raises(ConfigError, match=r"model.load = .*output.bias \(4,\).*the file has \(9,\)"):
        loaded.load(path)
    del saved["output.bias"]
    save_file(saved, path)
    with pytest.raises(ConfigError, match="the file has no such tensor"):
        loaded.load(path)
    with pytest.raises(ConfigError, match="a safetensors file is needed"):
        loaded.load(tmp_path / "absent")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "mpl"}, "model.name = 'mpl': did you mean 'mlp'"),
        ({"name": "mlp", "hiden": (3,)}, r"model.hiden = \(3,\): .*did you mean 'hidden'"),
        ({"name": "mlp", "hidden": ()}, "model.hidden = "),
        ({"name": "resnet", "norm": "layer"}, "model.norm = 'layer'"),
        ({"name": "transformer", "width": 9, "heads": 2}, "not a multiple of heads 2"),
    ],
)
def test_wrong_keys_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig(**keys)
    assert "\n" not in str(caught.value)


def test_defaults_are_resolved_and_survive_a_dump() -> None:
    config = ModelConfig(name="cnn")
    assert config.model_dump()["channels"] == (8, 16)
    assert ModelConfig(**config.model_dump()) == config
    assert ModelConfig.model_validate_json(config.model_dump_json()).model_dump() == config.model_dump()


@pytest.mark.parametrize("name", ["cnn", "resnet", "char-lstm", "transformer"])
def test_a_model_that_does_not_fit_the_data_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.name"):
        build_model(ModelConfig(name=name), Problem("classification", (9,), 2), 0)
