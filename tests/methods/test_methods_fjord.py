"""FjORD: nested corners, each coordinate the mean of those who hold it."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from methods_reference import INSTANT, Recording, batches, rate, run, start, with_programs
from methods_reference import gradient as gradient_at
from small import small_plan
from torch.func import functional_call
from toy import PROFILE, Watcher

from edgefl.data import Batch, Dataset
from edgefl.errors import ConfigError
from edgefl.learning import Learner, LocalSGD, TrainConfig, Workload
from edgefl.learning.ordered import OrderedSGD, Teaching
from edgefl.methods.federated.fjord import METHOD, CornerMean, corner
from edgefl.parameters import WeightedMean
from edgefl.planning.workloads import AssignConfig, Fleet, assign, assigned

UNEVEN = {"name": "dirichlet", "alpha": 0.5}


def boards(speeds):
    return [PROFILE.model_copy(update={"name": f"toy-{s}", "compute_flops": 1e9 / s}) for s in speeds]


@pytest.mark.parametrize(
    "train", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam"}], ids=str
)
def test_full_width_alone_is_fedavg_bit_for_bit(train):
    train = {"local_steps": 3} | train
    ours = run(small_plan("fjord", 4, rounds=3, train=train, data=UNEVEN, widths=(1.0,)))
    theirs = run(small_plan("fedavg", 4, rounds=3, train=train, data=UNEVEN))
    assert torch.equal(ours.results[0].values, theirs.results[0].values)
    assert ours.traffic.payload_bytes == theirs.traffic.payload_bytes


def test_one_width_for_all_is_fedavg_on_the_corner_and_nothing_else_moves():
    """Weight decay does not touch what is outside."""
    train = {"local_steps": 3, "momentum": 0.5, "weight_decay": 0.1}
    plan = small_plan("fjord", 3, rounds=2, train=train, data=UNEVEN, widths=(0.25,))
    whole = plan.learner.model
    held = corner(whole, 0.25)
    w = held.extract(whole.init())
    learner = Learner(held.model, TrainConfig(learning_rate=0.1, batch_size=16, **train))
    for t in range(2):
        mean = WeightedMean(held.model.layout)
        for spec in plan.nodes[1:]:
            work = LocalSGD(w, spec.data, t, Workload(batch_size=16, steps=3))
            mean.add(work.run(learner).parameters, len(spec.data))
        w = mean.value(otherwise=w)
    found = run(plan).results[0]
    assert torch.allclose(found.values[held.index], w.values, rtol=0, atol=1e-6)
    outside = torch.ones(whole.layout.size, dtype=torch.bool)
    outside[held.index] = False
    assert torch.equal(found.values[outside], whole.init().values[outside])


@pytest.mark.parametrize(
    "model", [{}, {"hidden": (10, 7)}, {"name": "cnn"}, {"name": "resnet", "norm": "none"}], ids=str
)
def test_corners_are_nested(model):
    whole = small_plan("fjord", 2, model=model).learner.model
    corners = [corner(whole, p) for p in (0.2, 0.4, 0.6, 0.8, 1.0)]
    for small, large in itertools.pairwise(corners):
        assert set(small.index.tolist()) < set(large.index.tolist())
        assert small.index.tolist() == sorted(small.index.tolist())
    assert corners[-1].model is whole


def test_widths_round_up_to_whole_units():
    whole = small_plan("fjord", 2, model={"hidden": (10,)}).learner.model
    assert [corner(whole, p).keep["hidden1"][-1] + 1 for p in (0.2, 0.3, 0.55, 0.01)] == [2, 3, 6, 1]


def test_a_coordinate_is_the_mean_of_those_who_hold_it():
    whole = small_plan("fjord", 2, model={"hidden": (4,)}).learner.model
    w = whole.init()
    small, large = corner(whole, 0.25), corner(whole, 0.75)
    mean = CornerMean(w)
    mean.add(small, torch.full_like(small.extract(w).values, 4.0), 1)
    mean.add(large, torch.full_like(large.extract(w).values, 1.0), 3)
    value = mean.value()
    assert torch.allclose(value.values[small.index], torch.tensor(1.75))
    inside, outside = set(small.index.tolist()), set(range(whole.layout.size)) - set(large.index.tolist())
    between = sorted(set(large.index.tolist()) - inside)
    assert torch.equal(value.values[between], torch.ones(len(between)))
    rest = sorted(outside)
    assert rest and torch.equal(value.values[rest], w.values[rest])


def test_the_slowest_get_the_smallest_corners_and_send_what_these_hold():
    plan = small_plan("fjord", 4, rounds=2, profiles=boards([1, 3, 1, 4, 2]), widths=(0.25, 0.5, 0.75, 1.0))
    outcome, model = run(plan), plan.learner.model
    for k, width in ((3, 0.25), (1, 0.5), (4, 0.75), (2, 1.0)):
        values = corner(model, width).model.layout.size
        for key in ((0, k, "Corner"), (k, 0, "TrainedCorner")):
            assert outcome.traffic.table[key][:2] == [2, 2 * 4 * values]


def test_a_step_trains_the_corner_that_it_drew():
    plan = small_plan("fjord", 1, rounds=1, train={"local_steps": 8}, widths=(0.5, 1.0))
    model, x = plan.learner.model, start(plan)
    recording = Recording(plan.learner)
    works = []
    inner = recording.run
    recording.run = lambda items: (works.extend(items), inner(items))[1]
    found = run(plan, executor=recording).results[0]
    (work,) = [w for w in works if isinstance(w, OrderedSGD)]
    assert {c.model for c in work.corners} == {model, corner(model, 0.5).model}
    for held, batch in zip(work.corners, batches(plan, 1, range(8)), strict=True):
        gone = torch.ones(len(x), dtype=torch.bool)
        gone[held.index] = False
        silent = x.masked_fill(gone, 0.0)
        x = torch.where(gone, x, x - rate(plan) * gradient_at(plan, silent, batch))
    assert torch.allclose(found.values, x, rtol=0, atol=1e-6)
    full = LocalSGD(model.init(), plan.nodes[1].data, 0, plan.nodes[1].workload).cost(plan.learner)
    halves = sum(c.model is not model for c in work.corners)
    assert work.cost(plan.learner).flops == pytest.approx(full.flops * (1 - halves / 8 / 2))


@pytest.mark.parametrize("train", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=str)
def test_without_a_share_for_the_teacher_nothing_is_taught(train):
    """Bit for bit, whatever the temperature."""
    found = [
        run(small_plan("fjord", 3, rounds=3, train={"local_steps": 3} | train, data=UNEVEN, **config))
        for config in ({}, {"distillation_alpha": 0.0, "distillation_temperature": 4.0})
    ]
    assert torch.equal(found[0].results[0].values, found[1].results[0].values)
    assert found[0].time_s == found[1].time_s


def test_where_all_train_the_whole_there_is_nobody_to_teach():
    plans = [
        small_plan("fjord", 3, rounds=2, widths=(1.0,), distillation_alpha=alpha) for alpha in (0.0, 1.0)
    ]
    alone, taught = (run(plan) for plan in plans)
    assert torch.equal(alone.results[0].values, taught.results[0].values)


def test_the_widest_corner_teaches_the_narrow_ones_in_every_step():
    """A step by hand: at alpha = 1 the labels reach the narrow corner through its teacher alone."""
    plan = small_plan(
        "fjord", 1, rounds=1, train={"local_steps": 8}, widths=(0.25, 1.0),
        distillation_alpha=1.0, distillation_temperature=2.0,
    )  # fmt: skip
    works = []

    class Keeping(Recording):
        def run(self, items):
            works.extend(items)
            return super().run(items)

    found = run(plan, executor=Keeping(plan.learner)).results[0]
    (work,) = [w for w in works if isinstance(w, OrderedSGD)]
    assert work.teaching == Teaching(1.0, 2.0)
    model, x = plan.learner.model, start(plan)
    module = model.build()
    for held, batch in zip(work.corners, batches(plan, 1, range(8)), strict=True):
        g = gradient_at(plan, x, batch)
        if held.model is not model:
            w = x.clone().requires_grad_()
            inside = torch.zeros(len(x), dtype=torch.bool)
            inside[held.index] = True
            given = functional_call(module, model.layout.views(x), (batch.x,)).detach()
            narrow = torch.where(inside, w, torch.zeros_like(w))
            own = functional_call(module, model.layout.views(narrow), (batch.x,))
            shares = (given / 2).softmax(1)
            (4 * (shares * (shares.log() - (own / 2).log_softmax(1))).sum(1).mean()).backward()
            g = g + w.grad
        x = x - rate(plan) * g
    assert torch.allclose(found.values, x, rtol=0, atol=1e-6)
    assert 0 < sum(c.model is not model for c in work.corners) < 8


def test_a_teacher_takes_time_and_no_bytes():
    plans = [
        small_plan("fjord", 2, rounds=3, access=INSTANT, distillation_alpha=alpha) for alpha in (0.0, 1.0)
    ]
    alone, taught = (run(plan) for plan in plans)
    assert taught.traffic.payload_bytes == alone.traffic.payload_bytes
    assert taught.time_s > 1.2 * alone.time_s


def test_no_client_is_late_where_limits_follow_speed():
    """Widths as speeds: each step of a corner takes each device about as long."""
    speeds, widths = [1, 4, 2, 1], (0.25, 0.5, 1.0)
    seconds = {}
    for name, config in (("fjord", {"widths": widths}), ("fedavg", {})):
        plan = small_plan(
            name, 3, rounds=4, access=INSTANT, profiles=boards(speeds), train={"local_steps": 8}, **config
        )
        seconds[name] = run(plan).time_s
    assert seconds["fjord"] <= 0.26 * seconds["fedavg"]


def planned_at(deadline_s, **config):
    """A run at planned widths, and what is planned."""
    plan = small_plan(
        "fjord", 4, rounds=6, access=INSTANT, profiles=boards([1, 1, 1.5, 2.5, 4]),
        train={"local_steps": 8}, **config,
    )  # fmt: skip
    training = functools.partial(METHOD.narrow_training, plan.config)
    fleet = Fleet.of(plan.nodes, plan.network, plan.learner, METHOD.widths(plan.config), training)
    found = assign(fleet, AssignConfig(policy="width", deadline_s=deadline_s))
    return replace(plan, nodes=assigned(plan.nodes, found)), found


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_no_round_at_planned_widths_ends_after_the_deadline_teacher_included(alpha):
    deadline_s = planned_at(None)[1].shares[1].total_s  # of the fastest alone at full width
    plan, found = planned_at(deadline_s, distillation_alpha=alpha)
    works = []

    class Keeping(Recording):
        def run(self, items):
            works.extend(w for w in items if isinstance(w, OrderedSGD))
            return super().run(items)

    watcher = Watcher()
    run(plan, watcher, Keeping(plan.learner))
    ends = [time_s for node, time_s, *_ in watcher.models if node == 0]
    assert len(ends) == 6 and max(b - a for a, b in itertools.pairwise([0.0, *ends])) <= deadline_s * 1.0001
    planned = {i: share.workload.width for i, share in found.shares.items()}
    assert planned == {1: 1.0, 2: 0.6, 3: 0.2, 4: 0.2} if not alpha else max(planned.values()) < 1
    limits = {w.data.node + 1: w.limit.model.layout.size for w in works}
    assert limits == {i: corner(plan.learner.model, p).model.layout.size for i, p in planned.items()}


def test_it_learns():
    plan = small_plan("fjord", 5, rounds=12, train={"local_steps": 20}, profiles=boards([1, 5, 4, 3, 2, 1]))
    outcome = run(plan)
    data = plan.nodes[1].data.dataset
    whole = plan.learner.model
    for width, least in ((1.0, 0.85), (0.4, 0.75)):
        held = corner(whole, width)
        learner = Learner(held.model, plan.learner.train)
        measured = learner.measure(held.extract(outcome.results[0]), Batch(data.x_test, data.y_test))
        assert measured.correct / measured.num_targets > least


def test_impossible_settings_are_refused():
    for widths in ((), (0.5, 0.5), (1.0, 0.5), (0.0, 1.0), (0.5, 1.5)):
        with pytest.raises(ConfigError, match="shares above 0 and up to 1"):
            METHOD.prepare(small_plan("fjord", 2, widths=widths))
    with pytest.raises(ConfigError, match="needs a model with hidden units"):
        METHOD.prepare(small_plan("fjord", 2, model={"name": "linear"}))
    with pytest.raises(ConfigError, match="norm = 'none'"):
        METHOD.prepare(small_plan("fjord", 2, model={"name": "resnet"}))
    METHOD.prepare(small_plan("fjord", 2))
    for config in ({"distillation_alpha": 1.5}, {"distillation_temperature": 0.0}):
        with pytest.raises(ValueError, match=next(iter(config))):
            METHOD.config(**config)
    x, y = torch.ones(40, 5), torch.ones(40, 1)
    houses = Dataset("houses", "regression", x, y, x, y, 1)
    with pytest.raises(ConfigError, match=r"distillation_alpha = 1\.0: 0 for regression"):
        METHOD.prepare(small_plan("fjord", 2, dataset=houses, distillation_alpha=1.0))


def test_a_report_of_another_size_is_refused_by_name():
    plan = small_plan("fjord", 2, rounds=1)
    seen = Watcher()

    async def client(node):
        inner, program = node.send, METHOD.roles["client"]

        def send(to, message):
            return inner(to, replace(message, values=torch.zeros(3)) if node.id == 1 else message)

        node.send = send
        await program(node)

    assert run(with_programs(plan, client=client), seen).status == "finished"
    assert [d for _, kind, _, d in seen.events if kind == "refused"] == [
        "the update of node 1: it does not fit its corner"
    ]
