"""Steps in corners of the model: what is outside is not touched, by any optimiser."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from learning_toys import IMAGE, dataset, local, mlp, near
from torch.nn import functional

from edgefl.devices import DeviceProfile
from edgefl.devices.kernels import KINDS, Kernels
from edgefl.learning import Learner, LocalSGD, TrainConfig, Workload, duration_s, tasks
from edgefl.learning.ordered import OrderedSGD, Teaching
from edgefl.learning.work_costs import gradient_cost

TRAINS = [
    {},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"optimizer": "adam", "learning_rate": 0.01},
    {"clip_norm": 0.5},
]


def work_of(model, data, corners, limit):
    start = limit.extract(model.init())
    return OrderedSGD(
        start,
        data,
        1,
        Workload(batch_size=8, steps=len(corners)),
        model=limit.model,
        limit=limit,
        corners=corners,
    )


@pytest.mark.parametrize("train", TRAINS, ids=str)
def test_all_steps_in_the_limit_are_local_sgd(train):
    data = local(dataset(*IMAGE), 20)
    model = mlp(data.dataset, 8)
    limit = model.narrow({"hidden1": range(6)})
    learner = Learner(model, TrainConfig(**train))
    work = work_of(model, data, (limit,) * 3, limit)
    plain = LocalSGD(work.parameters, data, 1, work.workload, model=limit.model)
    one, two = work.run(learner), plain.run(learner)
    assert near(one.parameters, two.parameters, 1e-7) and one.loss == pytest.approx(two.loss)
    assert work.cost(learner).flops == plain.cost(learner).flops


@pytest.mark.parametrize("train", TRAINS, ids=str)
def test_what_no_step_trains_stays_bit_for_bit(train):
    data = local(dataset(*IMAGE), 20)
    model = mlp(data.dataset, 8)
    limit, narrow = (model.narrow({"hidden1": range(n)}) for n in (6, 2))
    work = work_of(model, data, (narrow,) * 3, limit)
    found = work.run(Learner(model, TrainConfig(**train))).parameters.values
    inside = torch.isin(limit.index, narrow.index)
    before = work.parameters.values
    assert torch.equal(found[~inside], before[~inside]) and (found[inside] != before[inside]).any()
    assert (found[inside] != before[inside]).float().mean() > 0.5


def test_what_a_teacher_adds_to_a_loss_by_hand():
    """Teacher (1/4, 3/4), taught (1/2, 1/2): KL = ln(1/2) / 4 + 3 ln(3/2) / 4; at T, T^2 of that."""
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    for T in (1.0, 2.0):
        teacher = torch.tensor([[0.0, T * math.log(3.0)]]).repeat(5, 1)
        taught = torch.zeros(5, 2, requires_grad=True)
        loss = tasks.teaching_loss(taught, teacher, T)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(T * T * kl, rel=1e-6)
        # Its gradient: T (taught's shares - teacher's) / batch.
        assert torch.allclose(taught.grad, torch.tensor([[0.25, -0.25]]) * T / 5)
        assert float(tasks.teaching_loss(teacher, teacher, T)) == pytest.approx(0.0, abs=1e-7)


def taught_by_hand(learner, work, corner):
    """The steps of `work`, all in one corner, by automatic differentiation of the sum of both losses."""
    limit, teaching = work.limit, work.teaching
    place = torch.searchsorted(limit.index, corner.index)
    values = work.parameters.values.clone()
    state = learner.optimizer.zeros((), limit.model.layout)
    wide, narrow = limit.model.build(), corner.model.build()
    for step in work.steps:
        batch = work.data.batch(step, work.workload.batch_size)
        w = values.clone().requires_grad_()
        views = limit.model.layout.views(w), corner.model.layout.views(w[place])
        teacher = torch.func.functional_call(wide, views[0], (batch.x,))
        own = torch.func.functional_call(narrow, views[1], (batch.x,))
        T = teaching.temperature
        given = (teacher.detach() / T).softmax(1)
        kl = (given * (given.log() - (own / T).log_softmax(1))).sum(1).mean()
        hard = functional.cross_entropy(own, batch.y)
        loss = functional.cross_entropy(teacher, batch.y)
        (loss + (1 - teaching.alpha) * hard + teaching.alpha * T * T * kl).backward()
        gradient = w.grad
        learner.optimizer.clip_(gradient)
        learner.optimizer.step_(values, gradient, state, learner.optimizer.rate(1))
    return values


@pytest.mark.parametrize("train", TRAINS, ids=str)
@pytest.mark.parametrize("teaching", [Teaching(1.0), Teaching(0.3, 2.5)], ids=str)
def test_a_taught_step_goes_down_both_losses(train, teaching):
    data = local(dataset(*IMAGE), 20)
    model = mlp(data.dataset, 8)
    limit, narrow = (model.narrow({"hidden1": range(n)}) for n in (6, 2))
    work = dataclasses.replace(work_of(model, data, (narrow,) * 3, limit), teaching=teaching)
    learner = Learner(model, TrainConfig(**train))
    found = work.run(learner).parameters.values
    assert torch.allclose(found, taught_by_hand(learner, work, narrow), rtol=0, atol=1e-6)
    alone = dataclasses.replace(work, teaching=None).run(learner).parameters.values
    assert not torch.allclose(found, alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("train", TRAINS, ids=str)
def test_a_step_of_the_whole_limit_has_no_teacher(train):
    data = local(dataset(*IMAGE), 20)
    model = mlp(data.dataset, 8)
    limit = model.narrow({"hidden1": range(6)})
    learner = Learner(model, TrainConfig(**train))
    alone = work_of(model, data, (limit,) * 3, limit)
    taught = dataclasses.replace(alone, teaching=Teaching(0.5, 3.0))
    assert taught.run(learner).parameters.equal(alone.run(learner).parameters)
    assert taught.cost(learner) == alone.cost(learner)


def test_a_taught_step_costs_both_passes():
    data = local(dataset(*IMAGE), 20)  # batches of 8, 8 and 4
    model = mlp(data.dataset, 8)
    limit, narrow = (model.narrow({"hidden1": range(n)}) for n in (6, 2))
    learner = Learner(model, TrainConfig())
    work = dataclasses.replace(work_of(model, data, (limit, narrow, narrow), limit), teaching=Teaching(1.0))
    flops = [m.counts.forward_flops + m.counts.backward_flops for m in (limit.model, narrow.model)]
    found = work.cost(learner)
    assert found.flops == 20 * flops[0] + 12 * flops[1]
    assert found.num_steps == 5


@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("known", ["kernels", "step times", "neither"])
def test_a_step_takes_what_a_device_is_known_to_need_for_its_corner(taught, known):
    data = local(dataset(*IMAGE), 20)
    model = mlp(data.dataset, 8)
    limit, narrow = (model.narrow({"hidden1": range(n)}) for n in (6, 2))
    board = DeviceProfile(name="x", compute_flops=1e9, memory_bytes_per_s=1e9, memory_bytes=10**9)
    if known == "kernels":
        times = {k: ((*(9.0 for _ in names), 1e-6),) for k, (names, _) in KINDS.items()}
        products = tuple((8.0, n, 64.0, n / 1e3) for n in (1.0, 2.0, 6.0, 64.0))
        board = board.model_copy(
            update={"kernels": Kernels(step_s=0.0, node_s=0.0, times={**times, "matmul": products})}
        )
    elif known == "step times":
        seconds = {limit.model.label: {8: 0.5}, narrow.model.label: {8: 0.125}}
        board = board.model_copy(update={"step_times_s": seconds})
    learner = Learner(model, TrainConfig(batch_size=8))
    work = work_of(model, data, (narrow, limit, narrow), limit)
    if taught:
        work = dataclasses.replace(work, teaching=Teaching(0.5))
    expected = 0.0
    for i, corner in enumerate(work.corners):
        mine = limit if taught else corner
        step = LocalSGD(work.parameters, data, 1, work.workload, part=range(i, i + 1), model=mine.model)
        expected += duration_s(step.cost(learner), board)
        if taught and corner is narrow:
            num_examples = len(data.batch(work.steps[i], 8))
            expected += duration_s(gradient_cost(narrow.model, num_examples, 8), board)
    assert duration_s(work.cost(learner), board) == pytest.approx(expected, rel=1e-12)
    if known == "step times":
        assert expected == (1.75 if taught else 0.75)
