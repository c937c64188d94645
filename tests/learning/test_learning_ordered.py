"""Steps in corners of the model: what is outside is not touched, by any optimiser."""

from __future__ import annotations

import pytest
import torch
from learning_toys import IMAGE, dataset, local, mlp, near

from edgefl.learning import Learner, LocalSGD, TrainConfig, Workload
from edgefl.learning.ordered import OrderedSGD

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
