import itertools

import pytest
import torch

from edgefl.errors import ConfigError
from edgefl.learning import Optimizer, TrainConfig
from edgefl.parameters import BufferSpec, Layout, Vector

SETTINGS = {
    "sgd": {},
    "sgd-decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "clipped": {"momentum": 0.5, "clip_norm": 0.7},
    "adam": {"optimizer": "adam", "learning_rate": 0.01},
    "adam-decay": {"optimizer": "adam", "learning_rate": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99)},
    "adam-beta0": {"optimizer": "adam", "learning_rate": 0.01, "betas": (0.0, 0.99)},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.1, "eps": 1e-3},
}


def torch_optimizer(train: TrainConfig, parameter: torch.Tensor) -> torch.optim.Optimizer:
    lr, decay = train.learning_rate, train.weight_decay
    if train.optimizer == "sgd":
        return torch.optim.SGD([parameter], lr, train.momentum, weight_decay=decay, nesterov=train.nesterov)
    kind = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    return kind([parameter], lr, train.betas, train.eps, decay)


def gradients(num_steps: int = 6) -> torch.Tensor:
    return torch.randn(num_steps, 9, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_pytorchs(name: str) -> None:
    train = TrainConfig(**SETTINGS[name])
    optimizer, layout = Optimizer(train), Layout.of_shapes([("w", (9,))])
    ours, state = Vector(layout, torch.linspace(-1, 1, 9)), optimizer.init(layout)
    theirs = ours.values.clone().requires_grad_()
    reference = torch_optimizer(train, theirs)
    for g in gradients():
        theirs.grad = g.clone()
        if train.clip_norm:
            torch.nn.utils.clip_grad_norm_([theirs], train.clip_norm)
        reference.step()
        clipped = g.clone()
        optimizer.clip_(clipped)
        before = ours.values.clone(), None if state is None else [t.clone() for t in state]
        new, new_state = optimizer.step(ours, Vector(layout, clipped), state, round=0)
        assert torch.equal(ours.values, before[0])
        if state is not None:
            assert all(map(torch.equal, state, before[1]))
        ours, state = new, new_state
        torch.testing.assert_close(ours.values, theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "rates"), list(itertools.product(SETTINGS, ["one", "each"])))
def test_rows_of_a_matrix_step_as_if_alone(name: str, rates: str) -> None:
    train = TrainConfig(**SETTINGS[name])
    optimizer, layout = Optimizer(train), Layout.of_shapes([("w", (9,))])
    each = torch.tensor([[0.1], [0.02]]) if rates == "each" else torch.tensor([[0.1], [0.1]])
    rows, state = torch.randn(2, 9, generator=torch.Generator().manual_seed(1)), optimizer.zeros((2,), layout)
    alone = [(row.clone(), optimizer.zeros((), layout)) for row in rows]
    for g in gradients(4):
        together = torch.stack([g, 3 * g])
        optimizer.clip_(together)
        optimizer.step_(rows, together, state, each if rates == "each" else 0.1)
        for i, (row, own) in enumerate(alone):
            gradient = (1 + 2 * i) * g
            optimizer.clip_(gradient)
            optimizer.step_(row, gradient, own, float(each[i]))
            torch.testing.assert_close(rows[i], row, rtol=1e-6, atol=1e-6)


def test_one_step_by_hand() -> None:
    layout = Layout.of_shapes([("w", (2,))])
    optimizer = Optimizer(TrainConfig(learning_rate=0.5, momentum=0.5, weight_decay=0.1))
    w, g = Vector(layout, torch.tensor([1.0, -2.0])), Vector(layout, torch.tensor([1.0, 1.0]))
    w, state = optimizer.step(w, g, None, 0)
    # g + 0.1 w = (1.1, 0.8)
    torch.testing.assert_close(w.values, torch.tensor([0.45, -2.4]))
    assert state is not None
    torch.testing.assert_close(state[0], torch.tensor([1.1, 0.8]))


def test_buffers_move_in_full_and_counters_only_up() -> None:
    buffers = (BufferSpec("mean", (1,), torch.float32), BufferSpec("count", (), torch.int64))
    layout = Layout.of_shapes([("w", (1,))], buffers)
    w = Vector(layout, torch.ones(1), (torch.tensor([2.0]), torch.tensor(4)))
    g = Vector(layout, torch.ones(1), (torch.tensor([0.5]), torch.tensor(5)))
    new, state = Optimizer(TrainConfig(learning_rate=0.1)).step(w, g, None, 0)
    assert state is None
    assert new.values.tolist() == pytest.approx([0.9])
    assert [b.tolist() for b in new.buffers] == [[1.5], 5]


def test_schedules_by_hand() -> None:
    def rates(total: int | None = None, **keys: object) -> list[float]:
        optimizer = Optimizer(TrainConfig(learning_rate=1.0, **keys), total)
        return [optimizer.rate(t) for t in range(5)]

    assert rates() == [1.0] * 5
    assert rates(schedule="step", decay=0.5, decay_rounds=2) == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert rates(4, schedule="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)
    assert rates(9, schedule="cosine", schedule_rounds=2) == pytest.approx([1.0, 0.5, 0, 0, 0])
    assert rates(warmup_rounds=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.schedule_rounds"):
        Optimizer(TrainConfig(schedule="cosine"))
    with pytest.raises(ConfigError, match=r"train\.nesterov"):
        Optimizer(TrainConfig(nesterov=True))
