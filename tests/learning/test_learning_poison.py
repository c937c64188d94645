"""Hostile nodes, and local training with a correction, an anchor and in part."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small import digits, small_plan

from edgefl.data import LocalData
from edgefl.learning.executors import Batched, Inline
from edgefl.learning.poison import Poison, Poisoned, poisoned_data, with_flipped_labels
from edgefl.learning.work import Gradient, LocalSGD


@pytest.fixture
def plan():
    return small_plan("fedavg", 3, train={"local_steps": 4, "momentum": 0.5})


def works(plan, **more):
    start = plan.learner.model.init()
    return [LocalSGD(start, spec.data, 1, spec.workload, **more) for spec in plan.nodes[1:]]


def test_what_each_kind_makes_of_a_change(plan):
    work = works(plan)[0]
    start, honest = work.parameters, work.run(plan.learner)
    change = honest.parameters - start
    flipped = Poisoned(work, Poison("sign-flip", 3.0), 1).run(plan.learner)
    assert torch.allclose((flipped.parameters - start).values, -3 * change.values, rtol=1e-4, atol=1e-6)
    assert (flipped.loss, flipped.num_steps) == (honest.loss, honest.num_steps)
    assert bool(Poisoned(work, Poison("nan"), 1).run(plan.learner).parameters.values.isnan().all())
    noise = [Poisoned(work, Poison("noise", 0.5), node).run(plan.learner).parameters for node in (1, 1, 2)]
    assert noise[0].equal(noise[1]) and not noise[0].equal(noise[2])
    assert float((noise[0] - start).values.std()) == pytest.approx(0.5, rel=0.05)


def test_gradients_are_poisoned_and_costs_are_not(plan):
    spec = plan.nodes[1]
    work = Gradient(plan.learner.model.init(), spec.data, 0, spec.workload)
    hostile = Poisoned(work, Poison("sign-flip"), 1)
    honest, found = work.run(plan.learner).gradient, hostile.run(plan.learner).gradient
    assert torch.equal(found.values, -honest.values)
    assert hostile.cost(plan.learner) == work.cost(plan.learner)


def test_flipped_labels():
    flipped = with_flipped_labels(digits())
    assert torch.equal(flipped.y_train, 9 - digits().y_train) and flipped.y_test is digits().y_test
    part = small_plan("fedavg", 2).nodes[1].data
    assert torch.equal(poisoned_data(part, flipped).batch(3, 8).y, 9 - part.batch(3, 8).y)
    with pytest.raises(ValueError, match="no labels"):
        with_flipped_labels(dataclasses.replace(digits(), task="regression"))


def test_parts_of_a_round_are_the_round(plan):
    whole = works(plan)[0].run(plan.learner)
    work, y, state = works(plan)[0], None, None
    for part in (range(1), range(1, 3), range(3, 4)):
        r = dataclasses.replace(work, parameters=y or work.parameters, state=state, part=part).run(
            plan.learner
        )
        y, state = r.parameters, r.state
        assert r.num_steps == len(part)
    assert y.equal(whole.parameters)


def test_a_proximal_term_pulls_to_its_anchor(plan):
    work = works(plan, proximal_mu=2.0)[0]
    begun = dataclasses.replace(work, part=range(2)).run(plan.learner)
    rest = dataclasses.replace(work, parameters=begun.parameters, state=begun.state, part=range(2, 4))
    assert (
        dataclasses.replace(rest, anchor=work.parameters)
        .run(plan.learner)
        .parameters.equal(work.run(plan.learner).parameters)
    )
    assert not rest.run(plan.learner).parameters.equal(work.run(plan.learner).parameters)


def test_a_correction_is_added_to_each_gradient():
    plan = small_plan("fedavg", 1, train={"local_steps": 1})
    work = works(plan)[0]
    c = work.parameters.with_values(torch.full_like(work.parameters.values, 0.25))
    plain, moved = (w.run(plan.learner).parameters for w in (work, dataclasses.replace(work, correction=c)))
    assert torch.allclose(moved.values, plain.values - 0.1 * 0.25, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["correction", "anchor", "part"])
def test_side_by_side_gives_the_same_as_one_by_one(plan, kind):
    rng = torch.Generator().manual_seed(0)
    start = plan.learner.model.init()

    def drawn():
        return start.with_values(torch.randn(start.layout.size, generator=rng) * 0.1)

    def more(k):
        if kind == "correction":
            return {"correction": drawn()}
        if kind == "anchor":
            return {"anchor": drawn() if k else None, "proximal_mu": 1.0}
        return {"part": range(k, 3)}

    items = [dataclasses.replace(work, **more(k)) for k, work in enumerate(works(plan))]
    one, many = Inline(plan.learner).run(items), Batched(plan.learner).run(items)
    for a, b in zip(one, many, strict=True):
        assert torch.allclose(a.parameters.values, b.parameters.values, rtol=1e-5, atol=1e-6)
        assert a.num_steps == b.num_steps and a.loss == pytest.approx(b.loss, rel=1e-5)
    assert len({Batched(plan.learner).group_key(item) for item in items}) == 1


def test_poisoned_work_is_carried_out_by_itself(plan):
    hostile = Poisoned(works(plan)[0], Poison("noise"), 1)
    assert Batched(plan.learner).group_key(hostile) is None
    assert isinstance(works(plan)[0].data, LocalData)
