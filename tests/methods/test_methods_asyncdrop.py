"""AsyncDrop: sub-models by speed, merged where they belong and nowhere else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from effects import step_s
from methods_reference import INSTANT, Recording, batches, rate, run, start, with_programs
from methods_reference import gradient as gradient_at
from small import run_small, small_plan
from toy import PROFILE, Watcher

from edgefl.data import Batch
from edgefl.errors import ConfigError
from edgefl.learning.work import LocalSGD
from edgefl.methods.federated.asyncdrop import METHOD, droppable, window
from edgefl.nodes.plan import Crash, FaultPlan

SPEEDS = [1, 1, 1.3, 1.7, 2.9]


def boards(speeds):
    """Devices that take so many times longer, known as such to the server; the first is its own."""
    return [PROFILE.model_copy(update={"name": f"toy-{s}", "compute_flops": 1e9 / s}) for s in speeds]


def models(method, **config):
    watcher = Watcher()
    outcome = run_small(
        method,
        4,
        rounds=6,
        train={"momentum": 0.5},
        slowdowns=SPEEDS,
        watcher=watcher,
        access=INSTANT,
        **config,
    )
    return [(t, v.values) for _, t, _, v in watcher.models], outcome


@pytest.mark.parametrize("staleness", ["constant", "hinge"])
def test_with_nothing_dropped_it_is_fedasync_bit_for_bit(staleness):
    ours, _ = models("asyncdrop", drop_fraction=0.0, mixing_weight=0.6, staleness=staleness)
    theirs, _ = models("fedasync", proximal_rho=0.0, mixing_weight=0.6, staleness=staleness)
    assert len(ours) == len(theirs) == 24
    for (t, x), (s, y) in zip(ours, theirs, strict=True):
        assert t == pytest.approx(s) and torch.equal(x, y)


def test_one_client_taken_in_full_is_sgd_whose_momentum_restarts():
    train = {"local_steps": 3, "momentum": 0.9}
    plan = small_plan("asyncdrop", 1, rounds=3, train=train, drop_fraction=0.0, mixing_weight=1.0)
    x = start(plan)
    for r in range(3):
        velocity = torch.zeros_like(x)
        for batch in batches(plan, 1, range(3 * r, 3 * r + 3)):
            velocity = 0.9 * velocity + gradient_at(plan, x, batch)
            x = x - rate(plan) * velocity
    assert torch.allclose(run(plan).results[0].values, x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("masks", ["ranked", "random"])
@pytest.mark.parametrize("model", [{}, {"hidden": (16, 12)}, {"name": "cnn"}], ids=["mlp", "deep", "cnn"])
def test_a_merge_leaves_all_entries_outside_the_mask_as_they_are(masks, model):
    watcher = Watcher()
    outcome = run_small(
        "asyncdrop", 3, rounds=2, watcher=watcher, masks=masks, model=model, drop_fraction=0.5
    )
    assert outcome.status == "finished"
    whole = small_plan("asyncdrop", 3, model=model).learner.model
    size = whole.narrow({name: range(n // 2) for name, n in droppable(whole).items()}).model.layout.size
    before = whole.init()
    for _, _, _, x in watcher.models:
        assert 0 < int((x.values != before.values).sum()) <= size
        before = x


def test_residual_networks_keep_their_first_stage_and_their_shortcuts_whole():
    model = {"name": "resnet", "norm": "none", "channels": (4, 6), "blocks_per_group": 2}
    plan = small_plan("asyncdrop", 2, rounds=1, model=model)
    assert droppable(plan.learner.model) == {"residual3.inner": 6, "residual4.inner": 6}
    assert run(plan).status == "finished"


def test_windows_tile_the_units_where_p_is_one_in_so_many_ranks():
    scores = torch.tensor([3.0, 0, 5, 1, 9, 2, 2, 4])
    gone = [window(scores, r, 4, 0.25).tolist() for r in range(4)]
    assert gone == [[4, 2], [7, 0], [5, 6], [3, 1]]
    ties = [window(torch.zeros(8), r, 4, 0.25).tolist() for r in range(4)]
    assert ties == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_wide_windows_overlap_and_the_last_ones_are_one():
    gone = [tuple(window(torch.zeros(64), r, 8, 0.25).tolist()) for r in range(8)]
    times = np.bincount(np.concatenate([np.array(w) for w in gone]), minlength=64)
    assert len(set(gone)) == 7 and times.min() == 1 and times.max() == 3
    assert len(window(torch.zeros(10), 0, 2, 0.3)) == 3  # 0.3 x 10 is 3, whatever floats make of it


def test_the_fastest_goes_without_the_units_that_moved_most():
    """In each exchange, by the model of that moment."""
    plan = small_plan("asyncdrop", 4, rounds=6, profiles=boards([1, 2, 4, 1, 3]), drop_fraction=0.25)
    sent = []
    drop = METHOD.roles["server"]

    async def server(node):
        inner = node.send

        def send(to, message):
            sent.append((to, message))
            return inner(to, message)

        node.send = send
        return await drop(node)

    roles = {**METHOD.roles, "server": server}
    watcher = Watcher()
    run(dataclasses.replace(plan, method=dataclasses.replace(METHOD, roles=roles)), watcher)
    by_version = {step: x for _, _, step, x in watcher.models} | {0: plan.learner.model.init()}
    ranks = {3: 0, 1: 1, 4: 2, 2: 3}
    assert len(sent) > 20
    for k, m in sent:
        change = (by_version[m.version] - by_version[0]).named()
        moved = change["hidden1.weight"].abs().sum(1) + change["output.weight"].abs().sum(0)
        order = moved.argsort(descending=True, stable=True)
        gone = set(order[ranks[k] * 16 : ranks[k] * 16 + 16].tolist())
        assert set(m.kept.tolist()) == set(range(64)) - gone


def test_bytes_and_operations_are_those_of_the_formula():
    """64-64-10 with 48 units: 3,610 of 4,810 values; products cost 0.75 of what they cost in full."""
    outcome = run_small("asyncdrop", 1, rounds=3)
    down, up = (outcome.traffic.table[key] for key in ((0, 1, "Narrowed"), (1, 0, "Trimmed")))
    assert down[:2] == [3, 3 * (4 * 3610 + 2 * 48)] and up[:2] == [3, 3 * 4 * 3610]
    plan = small_plan("asyncdrop", 1)
    model, spec = plan.learner.model, plan.nodes[1]
    small = model.narrow({"hidden1": range(48)})
    whole = LocalSGD(model.init(), spec.data, 0, spec.workload).cost(plan.learner)
    part = LocalSGD(small.extract(model.init()), spec.data, 0, spec.workload, model=small.model)
    assert small.model.layout.size == 3610
    assert part.cost(plan.learner).flops == 0.75 * whole.flops
    assert part.cost(plan.learner).memory_bytes < 0.8 * whole.memory_bytes


def test_a_round_takes_three_quarters_of_the_time():
    def seconds(p):
        return run_small("asyncdrop", 2, rounds=5, access=INSTANT, drop_fraction=p).time_s

    assert seconds(0.25) == pytest.approx(0.75 * seconds(0.0), rel=1e-6)


def refused(changes, faults=None):
    """Why updates of client 1 are refused, the first of its last life with these changes sent before it."""
    plan = small_plan("asyncdrop", 2, rounds=6, faults=faults)
    last = 0 if faults is None else 1

    async def lying(node):
        inner, told = node.send, []

        def send(to, message):
            if node.id == 1 and node.life == last and not told:
                told.append(inner(to, dataclasses.replace(message, **changes)))
            return inner(to, message)

        node.send = send
        await METHOD.roles["client"](node)

    watcher = Watcher()
    outcome = run(with_programs(plan, client=lying), watcher)
    assert outcome.status == "finished"
    return [detail for _, kind, _, detail in watcher.events if kind == "refused"]


def test_an_update_without_a_known_mask_or_of_another_size_is_refused():
    assert refused({"values": torch.zeros(7)}) == ["the update of node 1: it does not fit its mask"]
    for changes in ({"turn": 99}, {"turn": -1}, {"given": 1}):
        assert refused(changes) == ["the update of node 1: it answers no model that it was given"]
    half_s = run_small("asyncdrop", 2, rounds=6).time_s / 2
    crash = FaultPlan(crashes=(Crash(1, at_s=half_s, down_s=half_s / 10),), detect_s=1e-4)
    assert refused({"turn": 0}, crash) == ["the update of node 1: its mask is not known any more"]


@pytest.mark.parametrize("at_share", [0.15, 0.5, 0.85])
def test_a_server_that_returns_knows_its_masks_and_nobody_else_is_held_up(at_share):
    whole_s = run_small("asyncdrop", 4, rounds=6).time_s
    for node in (0, 2):
        faults = FaultPlan(
            crashes=(Crash(node, at_s=at_share * whole_s, down_s=whole_s / 10),), detect_s=1e-3
        )
        outcome = run_small("asyncdrop", 4, rounds=8, faults=faults)
        assert outcome.status == "finished" and torch.isfinite(outcome.results[0].values).all()
        assert all(check.holds(outcome) is True for check in METHOD.invariants)


def test_the_rate_falls_to_a_tenth_at_shares_of_the_time():
    whole_s = run_small("asyncdrop", 2, rounds=8).time_s
    found = []

    class Keeping(Recording):
        def run(self, items):
            found.extend(
                (w.data.node, w.round, w.rate(self.learner)) for w in items if isinstance(w, LocalSGD)
            )
            return super().run(items)

    plan = small_plan("asyncdrop", 2, rounds=None, time_s=whole_s, rate_decay_at=(0.5, 0.75))
    watcher = Watcher()
    run(plan, watcher, Keeping(plan.learner))
    begun = {}
    for node, what, begin_s, _, _ in watcher.spans:
        if what == "compute":
            begun.setdefault(node, []).append(begin_s)
    assert len(found) > 12
    for node, turn, actual in found:
        share = begun[node + 1][turn] / whole_s if turn < len(begun[node + 1]) else 1.0
        tenths = (share >= 0.5) + (share >= 0.75)
        assert actual == pytest.approx(0.1 * 0.1**tenths)
    assert {round(r, 6) for _, _, r in found} == {0.1, 0.01, 0.001}


def test_impossible_settings_are_refused():
    for shares, why in (
        ((0.0, 0.5), "shares above 0 and below 1"),
        ((0.5,), "shares of stop.time_s"),
    ):
        with pytest.raises(ConfigError, match=why):
            METHOD.prepare(small_plan("asyncdrop", 2, rate_decay_at=shares))
    for model, message in (
        ({"name": "linear"}, "needs a model with hidden units"),
        ({"name": "resnet"}, "norm = 'none'"),
        ({"name": "resnet", "norm": "none", "channels": (4,)}, "needs a model with hidden units"),
        ({"hidden": (40_000,)}, "at most 32767 units"),
    ):
        plan = small_plan("asyncdrop", 2, model=model)
        with pytest.raises(ConfigError, match=message):
            METHOD.prepare(plan)
    METHOD.prepare(small_plan("asyncdrop", 2, model={"name": "linear"}, drop_fraction=0.0))


class Curve(Watcher):
    """Accuracy on the test set after each merge."""

    def __init__(self, plan):
        super().__init__()
        self.learner = plan.learner
        data = plan.nodes[1].data.dataset
        self.test, self.points = Batch(data.x_test, data.y_test), []

    def published(self, node, time_s, step, parameters, part):
        found = self.learner.measure(parameters, self.test)
        self.points.append((time_s, found.correct / found.num_targets))
        return False

    def smooth(self, every_s, window_s, end_s):
        """Time and mean accuracy over the window before it, every so often."""
        times, values = (np.array(column) for column in zip(*self.points, strict=True))
        grid = np.arange(every_s, end_s + every_s / 2, every_s)
        held = values[np.maximum(np.searchsorted(times, grid, side="right") - 1, 0)]
        width = round(window_s / every_s)
        return grid[width - 1 :], np.convolve(held, np.ones(width) / width, "valid")


def accuracy_curve(method, seed, **config):
    """Eight clients of two shards, seconds per step 1 : 2 : ... : 8; times in units of one
    full local round of the slowest."""
    torch.set_num_threads(1)
    plan = small_plan(
        method, 8, rounds=None, seed=seed, access=INSTANT, profiles=boards([1, *range(1, 9)]),
        data={"name": "shards", "shards_per_node": 2},
        train={"learning_rate": 0.05, "momentum": 0.9, "local_steps": 10},
        staleness="constant", mixing_weight=0.5, **config,
    )  # fmt: skip
    unit = 10 * step_s(plan, 8)
    curve = Curve(plan)
    outcome = run(dataclasses.replace(plan, time_s=120 * unit), curve)
    times, values = curve.smooth(unit / 20, 4 * unit, 120 * unit)
    reached = np.flatnonzero(values >= 0.75)
    first = float(times[reached[0]] / unit) if len(reached) else np.inf
    sent = outcome.traffic.payload_bytes / len(curve.points)
    return first, float(values[-1]), sent


@pytest.mark.slow
def test_sub_models_reach_an_accuracy_sooner():
    """At the end ranked masks are 1 to 2 points below FedAsync on average, on some seeds by 14 (five seeds
    here: 0.918 and 0.932; thirty in a separate simulation of the rule: 0.906 and 0.926, see the method's
    note for the cause), so that three seeds bound their mean loosely; random masks lose nothing."""
    found = {
        name: np.array([accuracy_curve(method, seed, **config) for seed in (1, 2, 3)])
        for name, method, config in (
            ("fedasync", "fedasync", {"proximal_rho": 0.0}),
            ("ranked", "asyncdrop", {}),
            ("random", "asyncdrop", {"masks": "random"}),
        )
    }
    times, ends, sent = ({name: rows[:, i].mean() for name, rows in found.items()} for i in range(3))
    assert times["ranked"] <= 0.85 * times["fedasync"] and times["random"] <= 0.85 * times["fedasync"]
    assert ends["random"] >= ends["fedasync"] - 0.01 and ends["ranked"] >= ends["fedasync"] - 0.05
    assert sent["ranked"] / sent["fedasync"] == pytest.approx(0.75, abs=0.01)
