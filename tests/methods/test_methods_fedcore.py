"""FedCore: FedAvg where nobody is slow; stragglers that keep the deadline with a coreset where some are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from methods_reference import INSTANT, Recording, batches, run, sgd, with_programs
from small import small_plan
from toy import PROFILE, Watcher

from edgefl.data import WeightedData
from edgefl.errors import ConfigError
from edgefl.learning import LocalSGD
from edgefl.learning.coreset import class_quotas
from edgefl.methods.federated.fedcore import METHOD, GlobalModel, Speed, coreset_size
from edgefl.network import Access

FREE = {"selection_s_per_pair": 0.0}
UNEVEN = {"name": "dirichlet", "alpha": 0.5, "min_examples": 30}


def boards(speeds):
    """The server's device, and clients' that take so many times longer, as planned."""
    return [PROFILE.model_copy(update={"name": f"toy-{s}", "compute_flops": 1e9 / s}) for s in (1, *speeds)]


def plan_of(method, speeds, *, epochs=4, train=None, rounds=3, **more):
    return small_plan(
        method,
        len(speeds),
        rounds=rounds,
        train={"local_steps": None, "local_epochs": epochs, "learning_rate": 0.05} | (train or {}),
        profiles=boards(speeds),
        **({"access": INSTANT} | more),
    )


def outcome_of(method, speeds, **more):
    watcher = Watcher()
    return run(plan_of(method, speeds, **more), watcher), watcher


def round_times(watcher):
    """Seconds of each round of the server."""
    times = [time_s for node, time_s, _, _ in watcher.models if node == 0]
    return np.diff([0.0, *times])


def busy(watcher, kind):
    """Seconds that each node spent on a kind of work, item by item."""
    found = {}
    for node, what, begin, end, detail in watcher.spans:
        if what == "compute" and detail.startswith(kind):
            found.setdefault(node, []).append(end - begin)
    return found


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_stragglers_it_is_fedavg_bit_for_bit(momentum):
    config = {"data": UNEVEN, "train": {"momentum": momentum}, "client_fraction": 0.5}
    ours, _ = outcome_of("fedcore", [1, 2, 1, 5, 1, 3], straggler_share=0.0, **config)
    theirs, _ = outcome_of("fedavg", [1, 2, 1, 5, 1, 3], **config)
    assert ours.results[0].equal(theirs.results[0])
    assert ours.time_s == pytest.approx(theirs.time_s, rel=1e-3)


def test_with_a_proximal_term_and_no_stragglers_it_is_fedprox_bit_for_bit():
    """The same steps in two parts, the second drawn to where the first began."""
    config = {"data": UNEVEN, "train": {"momentum": 0.5}, "proximal_mu": 0.5}
    ours, _ = outcome_of("fedcore", [1, 2, 1, 5], straggler_share=0.0, **config)
    theirs, _ = outcome_of("fedprox", [1, 2, 1, 5], **config)
    assert ours.results[0].equal(theirs.results[0])
    alone, _ = outcome_of("fedcore", [1, 2, 1, 5], straggler_share=0.0, **config | {"proximal_mu": 0.0})
    assert not torch.allclose(ours.results[0].values, alone.results[0].values, rtol=0, atol=1e-3)


def test_a_stragglers_steps_on_its_coreset_are_drawn_to_the_rounds_start():
    """One straggler alone at work: all its steps by hand, with the term."""
    works = []

    class Keeping(Recording):
        def run(self, items):
            works.extend(items)
            return super().run(items)

    plan = plan_of("fedcore", [1, 3], epochs=3, rounds=1, straggler_share=0.5, proximal_mu=0.7, **FREE)
    run(plan, executor=Keeping(plan.learner))
    (on_core,) = [w for w in works if isinstance(w, LocalSGD) and isinstance(w.data, WeightedData)]
    first = next(w for w in works if isinstance(w, LocalSGD) and w.data.node == on_core.data.node)
    assert on_core.anchor.equal(plan.learner.model.init()) and first.anchor.equal(on_core.anchor)
    assert not on_core.parameters.equal(on_core.anchor) and on_core.proximal_mu == first.proximal_mu == 0.7


def test_with_one_epoch_all_stragglers_sit_out_and_no_coreset_is_chosen():
    """Then it is FedAvg over the others alone, here written out."""
    plan = plan_of("fedcore", [1, 1, 1, 4, 4], epochs=1, rounds=1, straggler_share=0.3, data=UNEVEN)
    epoch = {k: len(plan.nodes[k].data) * (1, 1, 1, 4, 4)[k - 1] for k in range(1, 6)}
    theta = np.quantile(list(epoch.values()), 0.7)
    fast = [k for k in epoch if epoch[k] <= theta]
    watcher = Watcher()
    outcome = run(plan, watcher)
    total = torch.zeros(plan.learner.model.layout.size, dtype=torch.float64)
    for k in fast:
        data = plan.nodes[k].data
        total += len(data) * sgd(plan, batches(plan, k, range(-(-len(data) // 16)))).double()
    mean = total / sum(len(plan.nodes[k].data) for k in fast)
    assert torch.allclose(outcome.results[0].values.double(), mean, rtol=0, atol=1e-6)
    assert watcher.metrics[-1][2]["sat_out"] == 5 - len(fast) and "SelectCoreset" not in str(watcher.spans)
    dropped, _ = outcome_of(
        "fedcore", [1, 1, 1, 4, 4], epochs=1, rounds=1, straggler_share=0.3, data=UNEVEN, stragglers="sit-out"
    )
    assert dropped.results[0].equal(outcome.results[0])
    fedavg, _ = outcome_of("fedavg", [1, 1, 1, 4, 4], epochs=1, rounds=1, data=UNEVEN)
    assert not fedavg.results[0].equal(outcome.results[0])


@pytest.mark.parametrize("speeds", [[1, 1, 1, 1, 3, 3], [1, 1, 2, 2.5, 3, 3.9]])
@pytest.mark.parametrize("data", ["iid", UNEVEN], ids=["iid", "uneven"])
def test_stragglers_train_for_no_longer_than_the_deadline_and_the_quotas_rounding(speeds, data):
    E, C = 4, 10
    plan = plan_of("fedcore", speeds, epochs=E, straggler_share=0.34, data=data)
    watcher = Watcher()
    run(plan, watcher)
    epoch = {k: len(plan.nodes[k].data) * s for k, s in enumerate(speeds, 1)}  # in units of a fast example
    theta = np.quantile(list(epoch.values()), 0.66)
    unit_s = busy(watcher, "LocalSGD")[1][0] / epoch[1]
    num_rounds, seen = 3, 0
    for k, times in busy(watcher, "LocalSGD").items():
        m, tau = len(plan.nodes[k].data), E * theta
        c = m / epoch[k]
        most = tau * (1 + (C + 1) * (E - 1) / (c * tau)) * unit_s
        per_round = np.array(times).reshape(num_rounds, -1).sum(1)
        assert (per_round <= most * (1 + 1e-9)).all()
        if epoch[k] > theta:
            seen += 1
            assert (per_round >= 0.97 * tau * unit_s).all()  # and they use it
    assert seen >= 2


def test_the_work_of_a_round_is_an_epoch_and_the_quotas_of_the_coreset():
    """Examples that a straggler goes over: m + (E - 1) sum_y b_y, by the devices' own clock."""
    E, speeds = 5, [1, 1, 1, 3]
    plan = plan_of("fedcore", speeds, epochs=E, rounds=1, straggler_share=0.4)
    watcher = Watcher()
    run(plan, watcher)
    epoch = [len(plan.nodes[k].data) * s for k, s in enumerate(speeds, 1)]
    m, theta = len(plan.nodes[4].data), np.quantile(epoch, 0.6)
    b = int(np.ceil((E * theta / 3 - m) / (E - 1)))
    data = plan.nodes[4].data
    quotas = class_quotas(data.dataset.y_train.numpy()[data.indices], b)
    first_s, rest_s = busy(watcher, "LocalSGD")[4]
    assert rest_s / first_s == pytest.approx((E - 1) * sum(quotas.values()) / m)


def test_fedavg_waits_for_the_slow_where_fedcore_does_not():
    speeds = [1] * 6 + [3] * 3
    _, core = outcome_of("fedcore", speeds, straggler_share=0.4, **FREE)
    _, whole = outcome_of("fedavg", speeds)
    assert round_times(whole).mean() / round_times(core).mean() > 2.7
    assert [m["reports"] for _, _, m in core.metrics] == [9] * 3


def test_choosing_takes_the_devices_time_by_its_own_speed_or_as_stated():
    speeds = [1, 1, 1, 1, 3, 3]
    _, counted = outcome_of("fedcore", speeds, straggler_share=0.34)
    slow = busy(counted, "SelectCoreset")
    assert set(slow) == {5, 6} and min(map(min, slow.values())) > 0
    rounds = round_times(counted) - round_times(
        outcome_of("fedcore", speeds, straggler_share=0.34, **FREE)[1]
    )
    assert rounds == pytest.approx([max(slow[k][t] for k in slow) for t in range(3)], rel=0.2)
    _, faster = outcome_of("fedcore", [s / 2 for s in speeds], straggler_share=0.34)
    assert busy(faster, "SelectCoreset")[5] == pytest.approx([t / 2 for t in slow[5]])
    _, stated = outcome_of("fedcore", speeds, straggler_share=0.34, selection_s_per_pair=1e-6)
    data = plan_of("fedcore", speeds).nodes[5].data
    per_class = np.bincount(data.dataset.y_train.numpy()[data.indices])
    assert busy(stated, "SelectCoreset")[5] == pytest.approx([1e-6 * (per_class**2).sum()] * 3)


def test_charged_to_the_deadline_choosing_leaves_less_for_the_coreset():
    speeds = [1, 1, 1, 1, 3, 3]
    _, free = outcome_of("fedcore", speeds, straggler_share=0.4)
    _, charged = outcome_of("fedcore", speeds, straggler_share=0.4, charge_selection_to_deadline=True)
    tau = sum(busy(free, "LocalSGD")[1][:2])
    assert round_times(free).min() > 1.1 * tau and round_times(charged).max() < 1.07 * tau


def test_a_client_that_turns_out_slow_goes_by_its_own_clock():
    """One runs three times slower than its profile says, and s = 0: nobody is planned to be a straggler."""
    more = {"straggler_share": 0.0, "slowdowns": [1, 1, 1, 1, 3], **FREE}
    _, watched = outcome_of("fedcore", [1, 1, 1, 1], **more)
    tau = round_times(outcome_of("fedcore", [1, 1, 1, 1], straggler_share=0.0)[1]).max()
    assert round_times(watched).max() <= 1.05 * tau
    assert [m["reports"] for _, _, m in watched.metrics] == [4] * 3
    _, blind = outcome_of("fedcore", [1, 1, 1, 1], watch_clock=False, **more)
    assert [(m["reports"], m["late"]) for _, _, m in blind.metrics] == [(3, 1)] * 3
    assert round_times(blind) == pytest.approx([1.5 * tau] * 3, rel=1e-3)


def test_even_one_that_has_no_time_left_after_its_epoch_reports_it():
    more = {"straggler_share": 0.0, "slowdowns": [1, 1, 1, 1, 5], "round_deadline_s": 10.0}
    outcome, watcher = outcome_of("fedcore", [1, 1, 1, 1], **more)
    assert [m["reports"] for _, _, m in watcher.metrics] == [4] * 3 and outcome.status == "finished"
    assert "SelectCoreset" not in str(watcher.spans)


@pytest.mark.parametrize("stragglers", ["coreset", "random-coreset"])
def test_who_has_no_time_for_one_epoch_sits_out_unless_inputs_choose_the_coreset(stragglers):
    speeds, more = [1, 1, 1, 9], {"straggler_share": 0.4, "stragglers": stragglers, **FREE}
    _, without = outcome_of("fedcore", speeds, **more)
    assert [(m["reports"], m["sat_out"], m["late"]) for _, _, m in without.metrics] == [(3, 1, 0)] * 3
    assert 4 not in busy(without, "LocalSGD")
    _, inputs = outcome_of("fedcore", speeds, feature_coreset=True, **more)
    assert [(m["reports"], m["sat_out"]) for _, _, m in inputs.metrics] == [(4, 0)] * 3
    # Each class may keep one more than its share: 10 more, 9 times as slow, in each of 4 epochs of 359.
    tau = round_times(without).max()
    assert tau <= round_times(inputs).max() * 1.001 and round_times(inputs).max() <= tau * (1 + 10 * 9 / 359)


def test_a_round_in_which_nobody_takes_part_leaves_the_model():
    plan = plan_of("fedcore", [1, 1, 1, 9], rounds=8, straggler_share=0.4, client_fraction=0.25)
    watcher = Watcher()
    run(plan, watcher)
    before = plan.learner.model.init()
    empty = 0
    for (_, _, m), (_, _, _, w) in zip(watcher.metrics, watcher.models, strict=True):
        assert w.equal(before) == (m["reports"] == 0)
        empty += m["reports"] == 0
        before = w
    assert 0 < empty < 8


def test_lost_clients_are_cut_after_the_deadline_and_the_transfers():
    """At 1.5 tau, the slowest way there and back, and all at once on the server's line."""
    access = Access(up_bytes_per_s=1e6, down_bytes_per_s=2e6, latency_s=0.01)
    plan = plan_of(
        "fedcore", [1, 1, 1], straggler_share=0.0, watch_clock=False, slowdowns=[1, 1, 1, 30], access=access
    )
    watcher = Watcher()
    run(plan, watcher)
    tau, size = sum(busy(watcher, "LocalSGD")[1][:2]), 4 * plan.learner.model.layout.size
    expected = 1.5 * tau + 4 * 0.01 + 2 * size / 1e6 + 3 * size * (1e-6 + 0.5e-6)
    assert round_times(watcher)[1:] == pytest.approx([expected] * 2, rel=1e-6)


def test_the_epoch_deadline_is_that_percentile_of_what_clients_say_and_lies_are_refused():
    sent = []
    client = METHOD.roles["client"]

    async def lying(node):
        inner = node.send

        def send(to, message):
            if isinstance(message, Speed) and node.id == 2:
                message = dataclasses.replace(message, epoch_s=float("nan"))
            return inner(to, message)

        node.send = send
        await client(node)

    async def server(node):
        inner = node.send

        def send(to, message):
            sent.append(message)
            return inner(to, message)

        node.send = send
        return await METHOD.roles["server"](node)

    plan = plan_of("fedcore", [1, 2, 3, 4, 5], straggler_share=0.25)
    watcher = Watcher()
    run(with_programs(plan, client=lying, server=server), watcher)
    epoch = np.quantile([len(plan.nodes[k].data) * k for k in (1, 3, 4, 5)], 0.75)
    unit_s = busy(watcher, "LocalSGD")[1][0] / len(plan.nodes[1].data)
    (theta,) = {m.epoch_deadline_s for m in sent if isinstance(m, GlobalModel)}
    assert theta == pytest.approx(epoch * unit_s)
    refused = [detail for _, kind, _, detail in watcher.events if kind == "refused"]
    assert len(refused) == 1 and refused[0].startswith("the update of node 2: it claims nan s for an epoch")


def test_bytes_are_a_model_each_way_and_little_else():
    outcome, _ = outcome_of("fedcore", [1, 1, 3], straggler_share=0.5)
    table, size = outcome.traffic.table, 4 * plan_of("fedcore", [1]).learner.model.layout.size
    assert table[0, 3, "GlobalModel"][:2] == table[3, 0, "LocalModel"][:2] == [3, 3 * size]
    assert table[3, 0, "Speed"][0] == 1


def test_compressed_updates_of_stragglers_are_smaller_and_it_still_ends():
    outcome, watcher = outcome_of(
        "fedcore", [1, 1, 3], straggler_share=0.5, compress={"name": "top-k", "fraction": 0.05}
    )
    plain, _ = outcome_of("fedcore", [1, 1, 3], straggler_share=0.5)
    ours, theirs = (o.traffic.table[3, 0, "LocalModel"][1] for o in (outcome, plain))
    assert ours < 0.2 * theirs and [m["reports"] for _, _, m in watcher.metrics] == [3] * 3


def test_sizes_by_hand():
    # c tau - m = 100 - 60 examples over 4 epochs; a rounding error of the seconds is not one more.
    assert coreset_size(60, 6.0, 4.0, 4, whole=False) == 10
    assert coreset_size(60, 6.0, 4.0 + 1e-12, 4, whole=False) == 10
    assert (
        coreset_size(60, 6.0, 4.1, 4, whole=False) == 11 and coreset_size(60, 6.0, 4.1, 4, whole=True) == 10
    )
    assert coreset_size(60, 6.0, -1.0, 4, whole=False) == coreset_size(60, 6.0, 0.0, 4, whole=True) == 0


def test_what_it_cannot_run_is_refused_in_one_line():
    for plan, message in (
        (
            small_plan("fedcore", 2),
            "train.local_steps = 2: fedcore counts in epochs: give train.local_epochs",
        ),
        (plan_of("fedcore", [1], min_reports=2), "min_reports"),
    ):
        with pytest.raises(ConfigError, match=message):
            METHOD.prepare(plan)
