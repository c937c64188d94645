"""Work on threads: the same results whoever does it, and no wait without an end."""

import numpy as np
import pytest
import torch
from learning_toys import local, mlp, named_model

from edgefl.errors import ConfigError
from edgefl.learning import (
    Batched,
    Evaluate,
    Gradient,
    Inline,
    Learner,
    LocalSGD,
    TrainConfig,
    Workload,
    make_executor,
)
from edgefl.learning.dense import Prepared
from edgefl.learning.executors import Parallel
from edgefl.learning.workers import VARIABLE, default_workers


def work_on(name: str) -> tuple[Learner, list]:
    """Training, gradients and evaluations of several nodes; one has no data, and fails."""
    model, data = named_model(name)
    start, load = model.init(), Workload(batch_size=4, steps=2)
    works: list = [LocalSGD(start, local(data, 9, i), i, load) for i in range(7)]
    works += [Gradient(start, local(data, 9, i), i, load) for i in range(3)]
    works += [LocalSGD(start, local(data, 0), 0, load), Evaluate(start, local(data, 9).take(np.arange(9)))]
    return Learner(model, TrainConfig()), works


def said(result: object) -> object:
    """What tells whether two results are the same, to the bit."""
    if isinstance(result, Exception):
        return repr(result)
    vector = getattr(result, "parameters", getattr(result, "gradient", None))
    return (getattr(result, "loss", None), None if vector is None else vector.values.numpy().tobytes())


@pytest.mark.parametrize("name", ["cnn", "resnet-batch", "char-lstm"])
def test_parallel_gives_what_inline_gives_to_the_bit(name: str) -> None:
    learner, works = work_on(name)
    parallel = Parallel(learner, 3)
    expected = [said(result) for result in Inline(learner).run(works)]
    assert [said(result) for result in parallel.run(works)] == expected
    assert sum(isinstance(r, Exception) for r in parallel.run(works)) == 1


def test_groups_do_not_depend_on_how_many_threads_take_them() -> None:
    learner, works = work_on("mlp")
    alone, beside = Batched(learner, 3, workers=1), Batched(learner, 3, workers=3)
    assert [said(r) for r in alone.run(works)] == [said(r) for r in beside.run(works)]
    assert (alone.num_workers, beside.num_workers) == (0, 2)


def test_groups_are_of_about_equal_size() -> None:
    learner, works = work_on("mlp")
    batched = Batched(learner, 3)
    assert [len(group) for group in batched._groups(works[:7])] == [2, 2, 3]


def test_what_ends_a_threads_work_reaches_whoever_waits_for_it(monkeypatch) -> None:
    learner, works = work_on("mlp")
    batched = Batched(learner, 3, workers=2)

    def broken(_: object) -> None:
        raise SystemExit("the thread is told to go")

    monkeypatch.setattr(batched, "prepared", lambda works: Prepared(lambda: broken(works), list))
    with pytest.raises(SystemExit, match="told to go"):
        batched.run(works[:7])


def test_a_thread_builds_its_modules_without_touching_chance() -> None:
    model, data = named_model("cnn")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Parallel(Learner(model, TrainConfig()), 2).run(
        [LocalSGD(model.init(), local(data, 9, i), 0, Workload()) for i in range(4)]
    )
    assert torch.equal(torch.rand(3), expected)


def test_the_environment_says_how_many_threads(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, "5")
    assert default_workers() == 5
    model, _ = named_model("cnn")
    assert make_executor("auto", Learner(model, TrainConfig())).num_workers == 4
    monkeypatch.setenv(VARIABLE, "none")
    with pytest.raises(ConfigError, match=VARIABLE):
        default_workers()
    monkeypatch.delenv(VARIABLE)
    assert default_workers() >= 1
    with pytest.raises(ConfigError, match="workers"):
        Batched(Learner(mlp(named_model("mlp")[1]), TrainConfig()), 3, workers=0)
