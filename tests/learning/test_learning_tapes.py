"""Kept forward passes: the same results with and without them, and charged once."""

from __future__ import annotations

import pytest
import torch
from learning_toys import ALL_MODELS, named_model

from edgefl.data import Batch
from edgefl.learning import Learner, StageBackward, StageForward, TrainConfig
from edgefl.learning.tapes import Tapes

CUTS = [
    (name, cut)
    for name in ALL_MODELS
    if name != "linear"
    for cut in range(1, len(named_model(name)[0].blocks))
]


def bits(result):
    tensors = [result.parameters.values, *result.parameters.buffers]
    return [
        t.numpy().tobytes() for t in tensors + ([] if result.input is None else [result.input])
    ], result.loss


@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_a_kept_pass_gives_the_same_bytes_as_one_that_was_lost(name, cut):
    model, data = named_model(name)
    learner, last = Learner(model, TrainConfig()), len(model.blocks)
    front, rear = model.stage(0, cut), model.stage(cut, last)
    w, v = model.cut(model.init(), 0, cut), model.cut(model.init(), cut, last)
    batch = Batch(data.x_train[:6], data.y_train[:6])
    found = []
    for lost in (False, True):
        smashed = StageForward(front, w, batch.x, keep=True).run(learner)
        StageForward(rear, v, smashed, keep=True).run(learner)
        assert len(learner.tapes._tapes) == 2
        if lost:
            learner.tapes = Tapes(learner.tapes._make_scratch)
        upper = StageBackward(rear, v, smashed, labels=batch.y, kept=True).run(learner)
        work = StageBackward(front, w, batch.x, output_gradient=upper.input, input_gradient=False, kept=True)
        lower = work.run(learner)
        assert lower.input is None
        found.append((smashed.numpy().tobytes(), bits(upper), bits(lower)))
    assert found[0] == found[1]
    assert not learner.tapes._tapes
    # An LSTM's kernel for inference rounds otherwise than the one for training.
    torch.testing.assert_close(StageForward(front, w, batch.x).run(learner), smashed)


@pytest.mark.parametrize("name", ["cnn", "resnet-batch"])
def test_several_passes_can_be_open_and_the_oldest_is_given_up(name):
    model, _ = named_model(name)
    stage, w = model.stage(1, 3), model.cut(model.init(), 1, 3)
    learner = Learner(model, TrainConfig())
    learner.tapes = Tapes(learner.tapes._make_scratch, most=2)
    generator = torch.Generator().manual_seed(0)
    shape = (4, *stage.input_shape)
    inputs = [torch.randn(shape, generator=generator) for _ in range(3)]
    outputs = [StageForward(stage, w, x, keep=True).run(learner) for x in inputs]
    assert len(learner.tapes._tapes) == 2
    kept = [
        StageBackward(stage, w, x, y, kept=True).run(learner) for x, y in zip(inputs, outputs, strict=True)
    ]
    again = [StageBackward(stage, w, x, y).run(learner) for x, y in zip(inputs, outputs, strict=True)]
    assert list(map(bits, kept)) == list(map(bits, again))
    # Without buffers all open passes share one copy of the parameters.
    assert len(learner.tapes._benches[stage]) == (1 if name == "cnn" else 3)
    assert all(bench.num_open == 0 for bench in learner.tapes._benches[stage])


def test_forward_and_kept_backward_cost_what_one_training_step_costs():
    model, _ = named_model("cnn")
    learner, stage = Learner(model, TrainConfig()), model.stage(1, 3)
    x = stage.example(4)
    w = model.cut(model.init(), 1, 3)
    forward, whole, kept = (
        StageForward(stage, w, x, keep=True).cost(learner),
        StageBackward(stage, w, x, x).cost(learner),
        StageBackward(stage, w, x, x, kept=True).cost(learner),
    )
    assert forward.flops + kept.flops == whole.flops
    assert forward.traffic_bytes + kept.traffic_bytes == whole.traffic_bytes
    assert kept.memory_bytes == whole.memory_bytes
