import numpy as np
import pytest
import torch
from learning_toys import IMAGE, dataset, local, mlp, named_model, near

from edgefl.allocator import keep_memory
from edgefl.data import Batch, Dataset
from edgefl.errors import ConfigError
from edgefl.learning import (
    Batched,
    Call,
    Cost,
    Evaluate,
    Gradient,
    Inline,
    Learner,
    LocalSGD,
    TrainConfig,
    Trained,
    Work,
    Workload,
    make_executor,
)
from edgefl.learning.executors import even_group
from edgefl.parameters import Vector

REGRESSION = ("regression", (3,), 2)
TRAIN = {
    "sgd": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "adam": {"optimizer": "adam", "learning_rate": 0.01, "clip_norm": 0.5},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.1},
    "clipped-cosine": {"clip_norm": 0.2, "schedule": "cosine", "schedule_rounds": 9},
}


def moved(start: Vector, node: int) -> Vector:
    rng = np.random.default_rng(node)
    return start.with_values(
        start.values + 0.05 * torch.from_numpy(rng.standard_normal(len(start.values), "f"))
    )


def ragged(data: Dataset, start: Vector, mu: float = 0.0) -> list[LocalSGD]:
    """Nodes with 1, 3, 5, 6, 11 and 16 examples in batches of 4, at different rounds and models."""
    sizes = enumerate((5, 1, 16, 3, 11, 6, 16))
    return [
        LocalSGD(moved(start, i), local(data, n, i), i % 3, Workload(batch_size=4, epochs=2), mu * i)
        for i, n in sizes
    ]


def same(found: object, expected: object) -> bool:
    assert isinstance(found, Trained) and isinstance(expected, Trained)
    assert found.num_steps == expected.num_steps
    assert found.loss == pytest.approx(expected.loss, rel=1e-4)
    pairs = zip(found.state or (), expected.state or (), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) and a.shape == b.shape for a, b in pairs)
    return near(found.parameters, expected.parameters)


@pytest.mark.parametrize("shape", [IMAGE, REGRESSION], ids=["classification", "regression"])
@pytest.mark.parametrize("name", TRAIN)
def test_ragged_training_agrees_with_inline(name: str, shape: tuple[str, tuple[int, ...], int]) -> None:
    data = dataset(*shape)
    model = mlp(data, 6, 5)
    learner = Learner(model, TrainConfig(**TRAIN[name]))
    inline, batched = Inline(learner), Batched(learner, group=4)
    for works in (ragged(data, model.init()), ragged(data, model.init(), mu=0.3)):
        together, alone = batched.run(works), inline.run(works)
        assert all(map(same, together, alone))
        again = [
            LocalSGD(r.parameters, w.data, w.round + 1, w.workload, state=r.state if i % 2 else None)
            for i, (w, r) in enumerate(zip(works, alone, strict=True))
            if isinstance(r, Trained)
        ]
        assert len(again) == len(works)
        assert all(map(same, batched.run(again), inline.run(again)))


def test_company_changes_nothing_beyond_rounding() -> None:
    data = dataset(*IMAGE)
    model = mlp(data)
    batched = Batched(Learner(model, TrainConfig()))
    works = ragged(data, model.init())
    diverged = model.init().with_values(torch.full((model.layout.size,), float("nan")))
    bad = LocalSGD(diverged, local(data, 16), 0, Workload(batch_size=4, epochs=2))
    with_bad = batched.run([works[0], bad, *works[1:]])
    assert isinstance(with_bad[1], Trained) and with_bad[1].parameters.values.isnan().all()
    good = [r for i, r in enumerate(with_bad) if i != 1]
    assert all(map(same, good, batched.run(works)))


def test_a_short_batch_is_filled_up_from_its_own_examples() -> None:
    data = dataset(*IMAGE)
    data.x_train[0] = float("nan")
    model = mlp(data)
    works = [LocalSGD(model.init(), local(data, n, 1), 0, Workload(batch_size=4)) for n in (8, 3)]
    learner = Learner(model, TrainConfig())
    assert all(map(same, Batched(learner).run(works), Inline(learner).run(works)))


def test_gradients_agree_with_inline() -> None:
    data = dataset(*IMAGE)
    model = mlp(data)
    learner = Learner(model, TrainConfig(clip_norm=0.5))
    works = [
        Gradient(moved(model.init(), i), local(data, n, i), i, Workload(batch_size=4))
        for i, n in enumerate((9, 2, 4, 7))
    ]
    for found, expected in zip(Batched(learner).run(works), Inline(learner).run(works), strict=True):
        assert near(found.gradient, expected.gradient)  # type: ignore[attr-defined]
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [IMAGE, REGRESSION], ids=["classification", "regression"])
def test_evaluations_agree_with_inline(
    shape: tuple[str, tuple[int, ...], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "evaluated_at_once", 5)
    data = dataset(*shape)
    model = mlp(data)
    learner, batch = Learner(model, TrainConfig()), Batch(data.x_test, data.y_test)
    works = [Evaluate(moved(model.init(), i), batch) for i in range(5)]
    for found, expected in zip(Batched(learner).run(works), Inline(learner).run(works), strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)  # type: ignore[attr-defined]
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)  # type: ignore[attr-defined]


def fail() -> None:
    raise RuntimeError("no")


def test_mixed_work_keeps_its_order_and_each_its_own_error() -> None:
    data = dataset(*IMAGE)
    model = mlp(data)
    start, batch = model.init(), Batch(data.x_test, data.y_test)
    learner = Learner(model, TrainConfig())
    works: list[Work] = [
        LocalSGD(start, local(data, 5), 0, Workload()),
        Call(fail, (), Cost()),
        LocalSGD(start, local(data, 0, 1), 0, Workload()),
        Evaluate(start, batch),
        LocalSGD(mlp(data, 9).init(), local(data, 5, 2), 0, Workload()),
        LocalSGD(start, local(data, 5, 3), 0, Workload()),
    ]
    for executor in (Batched(learner), Inline(learner)):
        results = executor.run(works)
        kinds = [type(r).__name__ for r in results]
        assert kinds == ["Trained", "RuntimeError", "ValueError", "Evaluation", "ValueError", "Trained"]
        assert "node 1 has no data" in str(results[2]) and "another layout" in str(results[4])


def test_work_is_really_done_together(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(*IMAGE)
    model = mlp(data)
    batched = Batched(Learner(model, TrainConfig()), group=3)
    works = ragged(data, model.init())
    assert len({batched.group_key(w) for w in works}) == 1
    monkeypatch.setattr(LocalSGD, "run", lambda *_: fail())
    assert all(isinstance(r, Trained) for r in batched.run(works[:6]))
    assert isinstance(batched.run(works[:1])[0], RuntimeError)


def test_keys_tell_apart_what_cannot_go_together() -> None:
    data, other = dataset(*IMAGE), dataset(*IMAGE)
    model = mlp(data)
    batched, start = Batched(Learner(model, TrainConfig())), model.init()
    keys = [
        batched.group_key(work)
        for work in (
            LocalSGD(start, local(data, 5), 0, Workload()),
            LocalSGD(start, local(other, 5), 0, Workload()),
            LocalSGD(start, local(data, 5), 0, Workload(batch_size=3)),
            LocalSGD(start, local(data, 5), 0, Workload(), proximal_mu=0.1),
            Gradient(start, local(data, 5), 0, Workload()),
            Evaluate(start, Batch(data.x_test, data.y_test)),
            Evaluate(start, Batch(data.x_test[:3], data.y_test[:3])),
        )
    ]
    assert len(set(keys)) == len(keys) and None not in keys
    assert batched.group_key(Call(fail)) is None
    assert Inline(batched.learner).group_key(LocalSGD(start, local(data, 5), 0, Workload())) is None


def test_auto_decides_by_the_kind_of_model() -> None:
    for name, kind in (
        ("linear", "batched"),
        ("mlp", "batched"),
        ("cnn", "parallel"),
        ("transformer", "parallel"),
    ):
        learner = Learner(named_model(name)[0], TrainConfig())
        assert make_executor("auto", learner, workers=2).describe()["executor"] == kind
    learner = Learner(named_model("mlp")[0], TrainConfig())
    assert make_executor("batched", learner, 7).describe() == {"executor": "batched", "group": 7}
    assert make_executor("inline", learner).describe() == {"executor": "inline"}


def test_groups_are_even_for_the_items_that_come_at_a_time() -> None:
    assert [even_group(n) for n in (1, 32, 33, 64, 65, 100, 101, 1000)] == [32, 32, 17, 32, 33, 50, 34, 50]
    for n in range(33, 400):
        free = -n % even_group(n)  # places in the last group
        assert free < -(-n // even_group(n)) and even_group(n) <= 50


def test_groups_of_large_models_are_smaller() -> None:
    data = dataset(*IMAGE)
    sizes = {hidden: mlp(data, hidden).layout.size for hidden in (8, 30_000, 300_000)}
    groups = {h: Batched(Learner(mlp(data, h), TrainConfig()), 32).group for h in sizes}
    assert groups == {8: 32, 30_000: (1 << 23) // sizes[30_000], 300_000: 4}
    assert Batched(Learner(mlp(data, 300_000), TrainConfig()), 2).group == 2


def test_impossible_executors_are_refused() -> None:
    learner = Learner(named_model("cnn")[0], TrainConfig())
    with pytest.raises(ConfigError, match="cnn is no stack of dense layers"):
        make_executor("batched", learner)
    with pytest.raises(ConfigError, match="did you mean 'batched'"):
        make_executor("bached", learner)
    with pytest.raises(ConfigError, match="at least 1"):
        make_executor("batched", Learner(named_model("mlp")[0], TrainConfig()), 0)


def test_keep_memory_says_whether_it_took() -> None:
    import platform

    assert keep_memory() is (platform.libc_ver()[0] == "glibc")
