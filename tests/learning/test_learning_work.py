import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from learning_toys import IMAGE, TEXT, dataset, local, mlp, named_model, near

from edgefl.data import Batch
from edgefl.errors import ConfigError
from edgefl.learning import (
    Call,
    Cost,
    Evaluate,
    Gradient,
    Learner,
    LocalSGD,
    Model,
    ModelConfig,
    Problem,
    StageBackward,
    StageForward,
    TrainConfig,
    Workload,
    build_model,
)
from edgefl.parameters import Vector, WeightedMean


def plain_sgd(model: Model, start: Vector, batches: list[Batch], rate: float) -> list[torch.Tensor]:
    """An ordinary PyTorch loop: the parameters and buffers after it, in the vector's order."""
    module = model.build()
    module.load_state_dict(start.named())
    module.train()
    for batch in batches:
        x = batch.x
        if x.dim() == 4:
            x = torch.empty(x.shape, memory_format=torch.channels_last).copy_(x)
        output = module(x)
        loss = torch.nn.functional.cross_entropy(output.flatten(0, -2), batch.y.flatten())
        module.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in module.parameters():
                p.add_(p.grad, alpha=-rate)
    return [*[p.detach() for p in module.parameters()], *module.buffers()]


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet-batch", "char-lstm", "transformer"])
def test_one_client_fedavg_is_plain_sgd_bit_for_bit(name: str) -> None:
    model, data = named_model(name)
    learner, mine = Learner(model, TrainConfig(learning_rate=0.1)), local(data, 10)
    workload, w = Workload(batch_size=4, epochs=2), model.init()
    for t in range(2):
        mean = WeightedMean(model.layout)
        mean.add(LocalSGD(w, mine, t, workload).run(learner).parameters, len(mine))
        w = mean.value(otherwise=w)
    expected = plain_sgd(model, model.init(), [mine.batch(k, 4) for k in range(12)], 0.1)
    named = w.named()
    for (key, found), reference in zip(named.items(), expected, strict=True):
        assert torch.equal(found, reference), key


def test_training_changes_nothing_that_it_was_given() -> None:
    model, data = named_model("resnet-batch")
    learner = Learner(model, TrainConfig(momentum=0.9))
    start, copy = model.init(), model.init().values.clone()
    first = LocalSGD(start, local(data, 8), 0, Workload(batch_size=4)).run(learner)
    assert first.state is not None
    state = first.state[0].clone()
    kept = first.parameters.values.clone()
    second = LocalSGD(first.parameters, local(data, 8), 1, Workload(batch_size=4), state=first.state)
    second.run(learner)
    assert torch.equal(start.values, copy) and torch.equal(first.state[0], state)
    assert torch.equal(first.parameters.values, kept)
    # Four batches seen in two rounds by each batch-norm counter after the second.
    assert {int(b) for b in second.run(learner).parameters.buffers if b.dim() == 0} == {4}


def test_state_carries_over_rounds() -> None:
    data = dataset(*IMAGE)
    model, mine = mlp(data), local(data, 8)
    learner = Learner(model, TrainConfig(optimizer="adam", learning_rate=0.01))
    whole = LocalSGD(model.init(), mine, 0, Workload(batch_size=4, steps=6)).run(learner)
    half, w, state = Workload(batch_size=4, steps=3), model.init(), None
    for t in range(2):
        done = LocalSGD(w, mine, t, half, state=state).run(learner)
        w, state = done.parameters, done.state
    assert w.equal(whole.parameters)


def test_proximal_term_by_hand() -> None:
    data = dataset("regression", (3,), 2)
    model, mine = mlp(data), local(data, 8)
    learner, start, mu = Learner(model, TrainConfig(learning_rate=0.1)), model.init(), 0.5
    w = start
    for step in range(2):
        g = Gradient(w, mine, step, Workload(batch_size=4)).run(learner).gradient
        w = w - 0.1 * (g + mu * (w - start))
    found = LocalSGD(start, mine, 0, Workload(batch_size=4, steps=2), proximal_mu=mu).run(learner)
    assert near(found.parameters, w)
    assert found.num_steps == 2


def test_gradient_of_least_squares_by_hand() -> None:
    data = dataset("regression", (3,), 2)
    model = build_model(ModelConfig(name="linear"), data, 0)
    mine = local(data, 4)
    batch = mine.batch(0, 4)
    w = model.init()
    weight = w.named()["output.weight"]
    residual = batch.x @ weight.T - batch.y
    result = Gradient(w, mine, 0, Workload(batch_size=4)).run(Learner(model, TrainConfig()))
    assert result.loss == pytest.approx(float(residual.square().mean()))
    torch.testing.assert_close(result.gradient.named()["output.weight"], 2 * residual.T @ batch.x / 8)
    clipped = Gradient(w, mine, 0, Workload(batch_size=4)).run(Learner(model, TrainConfig(clip_norm=0.1)))
    assert clipped.gradient.norm() == pytest.approx(0.1, rel=1e-4)


def test_evaluation_by_hand() -> None:
    model = build_model(ModelConfig(name="linear"), Problem("classification", (2,), 2), 0)
    learner = Learner(model, TrainConfig())
    w = Vector(model.layout, torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0]))
    batch = Batch(torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]]), torch.tensor([0, 1, 1]))
    found = Evaluate(w, batch).run(learner)
    right, wrong = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert found.loss == pytest.approx((2 * right + wrong) / 3)
    assert found.metrics == {"accuracy": pytest.approx(2 / 3)} and found.num_examples == 3


def test_metrics_of_regression_and_language() -> None:
    data = dataset("regression", (3,), 2)
    found = Evaluate(mlp(data).init(), Batch(data.x_test, data.y_test)).run(Learner(mlp(data), TrainConfig()))
    assert found.metrics["rmse"] == pytest.approx(math.sqrt(found.loss))
    model, text = named_model("transformer")
    flat = Vector(model.layout, torch.zeros(model.layout.size))
    found = Evaluate(flat, Batch(text.x_test, text.y_test)).run(Learner(model, TrainConfig()))
    assert found.metrics["perplexity"] == pytest.approx(TEXT[2], rel=1e-5)
    assert list(found.metrics) == ["perplexity", "accuracy"]
    assert found.metrics["accuracy"] == pytest.approx(float((text.y_test == 0).double().mean()))


def test_large_batches_are_evaluated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = named_model("cnn")
    learner, work = Learner(model, TrainConfig()), Evaluate(model.init(), Batch(data.x_test, data.y_test))
    whole = work.run(learner)
    monkeypatch.setattr(Learner, "evaluated_at_once", 5)
    parts = work.run(learner)
    assert parts.loss == pytest.approx(whole.loss) and parts.metrics == whole.metrics


def test_evaluation_uses_running_statistics_and_keeps_them() -> None:
    model, data = named_model("resnet-batch")
    learner, start = Learner(model, TrainConfig()), model.init()
    one = Evaluate(start, Batch(data.x_test[:1], data.y_test[:1])).run(learner)
    both = Evaluate(start, Batch(data.x_test[[0, 0]], data.y_test[[0, 0]])).run(learner)
    assert one.loss == pytest.approx(both.loss)
    assert learner.scratch(model).vector().equal(start)


def test_gradient_moves_batch_statistics_as_training_does() -> None:
    model, data = named_model("resnet-batch")
    learner, mine, workload = Learner(model, TrainConfig()), local(data, 8), Workload(batch_size=4, steps=1)
    trained = LocalSGD(model.init(), mine, 0, workload).run(learner).parameters
    gradient = Gradient(model.init(), mine, 0, workload).run(learner).gradient
    stepped, _ = learner.optimizer.step(model.init(), gradient, None, 0)
    assert near(stepped, trained, 1e-6)


def test_nothing_to_work_on_is_an_error() -> None:
    data = dataset(*IMAGE)
    model, learner = mlp(data), Learner(mlp(data), TrainConfig())
    with pytest.raises(ValueError, match="node 0 has no data"):
        LocalSGD(model.init(), local(data, 0), 0, Workload()).run(learner)
    with pytest.raises(ValueError, match="found none"):
        Evaluate(model.init(), Batch(data.x_test[:0], data.y_test[:0])).run(learner)
    with pytest.raises(ValueError, match="another layout"):
        Evaluate(mlp(data, 9).init(), Batch(data.x_test, data.y_test)).run(learner)


def test_costs_by_hand() -> None:
    data = dataset(*IMAGE)
    model = mlp(data, 6)
    size, saved, flops = 4 * model.layout.size, model.counts.saved_bytes, 2 * (2 * 64 * 6 + 3 * 6 * 4)
    learner = Learner(model, TrainConfig(momentum=0.9))
    # Ten examples in batches of 4: 4, 4, 2, 4, 4, 2, ...; steps 5, ..., 9 are 2, 4, 4, 2, 4.
    work = LocalSGD(model.init(), local(data, 10), 1, Workload(batch_size=4, steps=5))
    cost = work.cost(learner)
    assert cost.flops == 16 * flops
    assert cost.num_steps == 5 and (cost.model, cost.batch_size) == (model.label, 4)
    assert cost.traffic_bytes == 5 * (6 * size + 2 * size) + 16 * 3 * saved
    assert cost.memory_bytes == 3 * size + 4 * 2 * saved
    assert Gradient(model.init(), local(data, 10), 2, Workload(batch_size=4)).cost(learner).flops == 2 * flops
    evaluate = Evaluate(model.init(), Batch(data.x_test, data.y_test)).cost(learner)
    assert (evaluate.flops, evaluate.model) == (17 * model.counts.forward_flops, None)


def test_stage_costs_add_up_to_the_whole() -> None:
    model, data = named_model("cnn")
    learner, x = Learner(model, TrainConfig()), data.x_train[:6]
    front, back = model.stage(0, 2), model.stage(2, 4)
    w_front, w_back = model.cut(model.init(), 0, 2), model.cut(model.init(), 2, 4)
    smashed = StageForward(front, w_front, x).run(learner)
    forward = [
        StageForward(s, w, i).cost(learner).flops
        for s, w, i in ((front, w_front, x), (back, w_back, smashed))
    ]
    assert sum(forward) == 6 * model.counts.forward_flops
    upper = StageBackward(back, w_back, smashed, labels=data.y_train[:6])
    lower = StageBackward(front, w_front, x, output_gradient=smashed, input_gradient=False)
    whole = 6 * (model.counts.forward_flops + model.counts.backward_flops)
    assert upper.cost(learner).flops + lower.cost(learner).flops == whole


def test_stage_backward_takes_one_of_labels_and_gradient() -> None:
    model, data = named_model("mlp")
    with pytest.raises(ValueError, match="either"):
        StageBackward(model, model.init(), data.x_train)


def test_call_freezes_its_arguments_and_refuses_closures() -> None:
    learner = Learner(mlp(dataset(*IMAGE)), TrainConfig())
    numbers, array = [1, 2], np.ones(2)
    work = Call(lambda a, b: (a, b.sum()), (numbers, array), Cost(flops=7))
    numbers.append(3)
    array += 1
    assert work.run(learner) == ([1, 2], 2.0)
    assert work.cost(learner).flops == 7 and work.batch_key(learner) is None
    with pytest.raises(ConfigError, match="closes over names"):
        Call(lambda: numbers)


@pytest.mark.parametrize("name", ["cnn", "transformer", "resnet-group"])
def test_the_gradient_at_a_stage_has_the_bits_of_pytorchs_backward(name: str) -> None:
    model, data = named_model(name)
    stage = model.stage(1, len(model.blocks) - 1)
    w = model.cut(model.init(), 1, len(model.blocks) - 1)
    learner = Learner(model, TrainConfig())
    x = StageForward(model.stage(0, 1), model.cut(model.init(), 0, 1), data.x_train[:5]).run(learner)
    scratch = learner.scratch(stage)
    scratch.load(w)
    leaf = scratch.inputs(x).detach().requires_grad_()
    output = scratch.forward(leaf, training=True)
    g = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    scratch.gradient.zero_()
    output.backward(g)
    expected = scratch.gradient.clone()
    found = StageBackward(stage, w, x, output_gradient=g).run(learner)
    assert torch.equal(found.parameters.values, expected) and torch.equal(found.input, leaf.grad)


def test_a_stages_backward_pass_does_not_load_sympy() -> None:
    """It takes half a second, in each process that holds a part of a model."""
    code = """
import sys, torch
from edgefl.data.config import DataConfig
from edgefl.data.load import load_dataset
from edgefl.learning import Learner, ModelConfig, StageBackward, TrainConfig, build_model
model = build_model(ModelConfig(name="mlp"), load_dataset(DataConfig()), 0)
stage, x = model.stage(0, 1), torch.ones(2, 1, 8, 8)
w = model.cut(model.init(), 0, 1)
gradient = torch.ones(2, *stage.block_counts[-1].output_shape)
StageBackward(stage, w, x, output_gradient=gradient).run(Learner(model, TrainConfig()))
print("sympy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_step_imports_no_optimiser_of_pytorch() -> None:
    code = """
import sys, torch
from edgefl.learning import Optimizer, TrainConfig
optimizer = Optimizer(TrainConfig(optimizer="adam"))
optimizer.step_(torch.ones(2), torch.ones(2), (torch.zeros(2), torch.zeros(2), torch.zeros(1)), 0.1)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
