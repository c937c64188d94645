"""SplitFed V1 and V2, parallel split learning: FedAvg, SGD on unions, and the order of the batches."""

from __future__ import annotations

import pytest
import torch
from methods_reference import batches, sgd, start, union
from small import small_plan
from split_lab import model_plan, near, payload, run
from toy import Watcher

from edgefl.devices import DeviceProfile
from edgefl.errors import ConfigError
from edgefl.keyed import generator
from edgefl.nodes.plan import Crash, FaultPlan

DEEP = {"hidden": (32, 16)}
UNEVEN = {"name": "dirichlet", "alpha": 0.5}


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize(
    "train", [{"local_steps": 3}, {"local_steps": None, "local_epochs": 1, "momentum": 0.9}]
)
def test_v1_is_fedavg(cut, train):
    common = {"rounds": 3, "model": DEEP, "train": train, "data": UNEVEN}
    fedavg = run(small_plan("fedavg", 4, **common)).results[0]
    assert near(run(small_plan("splitfed-v1", 4, cut=cut, **common)).results[0], fedavg, 1e-6)


@pytest.mark.parametrize("method", ["splitfed-v1", "parallel-split"])
def test_one_step_of_equal_batches_is_one_step_on_their_union(method):
    plan = small_plan(method, 4, rounds=3, train={"local_steps": 1, "batch_size": 8}, equal_shares=True)
    x = start(plan)
    for t in range(3):
        x = sgd(plan, [union(b for k in range(1, 5) for b in batches(plan, k, [t]))], x)
    assert torch.allclose(run(plan).results[0].values, x, rtol=0, atol=1e-6)


def test_parallel_split_of_unequal_batches_is_one_step_on_their_union():
    plan = small_plan(
        "parallel-split", 3, rounds=2, train={"local_steps": 1, "batch_size": 2000}, data=UNEVEN
    )
    x = start(plan)
    for t in range(2):
        x = sgd(plan, [union(b for k in range(1, 4) for b in batches(plan, k, [t]))], x)
    sizes = {len(batches(plan, k, [0])[0]) for k in range(1, 4)}
    assert len(sizes) == 3
    assert torch.allclose(run(plan).results[0].values, x, rtol=0, atol=1e-6)


def test_v2_with_two_clients_is_not_v1_and_its_orders_are_not_alike():
    common = {"rounds": 2, "model": DEEP, "train": {"local_steps": 3}}
    v1 = run(small_plan("splitfed-v1", 2, **common)).results[0]
    by_batch = run(small_plan("splitfed-v2", 2, **common)).results[0]
    by_client = run(small_plan("splitfed-v2", 2, interleave="client", **common)).results[0]
    assert not near(v1, by_batch, 1e-4) and not near(by_batch, by_client, 1e-5)


@pytest.mark.parametrize("interleave", ["batch", "client"])
def test_v2_steps_its_rear_in_the_keyed_order_whatever_the_speeds(interleave):
    """By hand: the fronts' own steps, one rear in the given order, the fronts averaged at the end."""
    common = {"rounds": 1, "train": {"local_steps": 2}, "interleave": interleave}
    plan = small_plan("splitfed-v2", 3, **common)
    slow = small_plan("splitfed-v2", 3, slowdowns=[1, 9, 1, 4], **common)
    found = run(plan).results[0]
    assert found.equal(run(slow).results[0])
    model, learner = plan.learner.model, plan.learner
    w = model.init()
    fronts, rear = {k: model.cut(w, 0, 1) for k in (1, 2, 3)}, model.cut(w, 1, 2)
    steps = dict.fromkeys(fronts, 0)
    for k in _order(plan, interleave):
        (batch,) = batches(plan, k, [steps[k]])
        steps[k] += 1
        whole = model.join(fronts[k], rear)
        after = whole.with_values(sgd(plan, [batch], whole.values))
        fronts[k], rear = model.cut(after, 0, 1), model.cut(after, 1, 2)
    n = {k: len(plan.nodes[k].data) for k in fronts}
    mean = sum(fronts[k].values * (n[k] / sum(n.values())) for k in fronts)
    assert torch.allclose(found.values, torch.cat([mean, rear.values]), rtol=0, atol=1e-6)
    assert learner.optimizer.rate(0) == 0.1


def _order(plan, interleave):
    if interleave == "client":
        for k in generator(plan.seed, "order", 0, 0).permutation([1, 2, 3]):
            yield from [int(k)] * 2
    else:
        for s in range(2):
            yield from map(int, generator(plan.seed, "order", 0, 0, s).permutation([1, 2, 3]))


@pytest.mark.parametrize("method", ["splitfed-v1", "splitfed-v2", "parallel-split"])
def test_bytes_of_a_round(method):
    steps, B, q, rounds = 3, 16, 64, 2
    plan = small_plan(method, 3, rounds=rounds, train={"local_steps": steps, "batch_size": B})
    table = run(plan).traffic.table
    front = 4 * (64 * 64 + 64)
    for k in (1, 2, 3):
        assert payload(table, "SmashedData", node=k) == rounds * steps * (4 * B * q + 4 * B)
        assert payload(table, "SmashedGradient", node=k) == rounds * steps * 4 * B * q
        assert payload(table, "Front", node=k) == payload(table, "FrontBack", node=k) == rounds * front


@pytest.mark.parametrize("method", ["splitfed-v1", "splitfed-v2", "parallel-split"])
def test_eight_bits_at_the_cut_cost_a_quarter_and_their_error_is_told(method):
    steps, B, q, rounds = 4, 16, 64, 3
    plan = small_plan(method, 2, rounds=rounds, train={"local_steps": steps}, cut_bits=8)
    exact = small_plan(method, 2, rounds=rounds, train={"local_steps": steps})
    watcher = Watcher()
    outcome = run(plan, watcher)
    crossed = rounds * steps * (B * q + 4 * (B * q // 512))
    assert payload(outcome.traffic.table, "SmashedGradient", node=1) == crossed
    assert payload(outcome.traffic.table, "SmashedData", node=1) == crossed + rounds * steps * 4 * B
    errors = [m["cut_error"] for _, _, m in watcher.metrics if "cut_error" in m]
    assert len(errors) == 2 * 2 * rounds * steps
    assert 0 < max(errors) < 0.05
    difference = (outcome.results[0].values - run(exact).results[0].values).norm()
    assert 0 < difference < 0.02 * run(exact).results[0].values.norm()


@pytest.mark.parametrize("method", ["split-learning", "split-learning-u", "splitfed-v1"])
def test_a_tenth_of_the_values_at_the_cut_and_its_error_is_told(method):
    plan = small_plan(method, 2, rounds=2, model=DEEP, train={"local_steps": 4}, cut_keep=0.1)
    watcher = Watcher()
    outcome = run(plan, watcher)
    kept = 52  # of 16 x 32 values, with a bitmap
    assert payload(outcome.traffic.table, "SmashedGradient", node=1) == 2 * 4 * (16 * 32 // 8 + 4 * kept)
    errors = [m["cut_error"] for _, _, m in watcher.metrics if "cut_error" in m]
    assert len(errors) == 2 * 2 * 4 * (4 if method == "split-learning-u" else 2) and 0.1 < max(errors) < 1
    assert torch.isfinite(outcome.results[0].values).all()


@pytest.mark.parametrize("method", ["split-learning", "split-learning-u", "splitfed-v1"])
def test_noise_is_added_by_clients_to_their_smashed_data_alone(method):
    plan = small_plan(method, 2, rounds=2, model=DEEP, train={"local_steps": 4}, cut_noise=0.2)
    watcher = Watcher()
    noisy = run(plan, watcher).results[0]
    told = [node for node, _, m in watcher.metrics if "cut_error" in m]
    assert sorted(told) == [1] * 8 + [2] * 8
    exact = run(small_plan(method, 2, rounds=2, model=DEEP, train={"local_steps": 4})).results[0]
    assert 0 < float((noisy.values - exact.values).norm()) < 0.2 * float(exact.values.norm())


@pytest.mark.parametrize("method", ["splitfed-v1", "splitfed-v2", "parallel-split"])
@pytest.mark.parametrize("at_s", [0.0, 0.0004, 0.0021])
def test_a_client_that_leaves_is_left_out_and_one_that_returns_takes_part_again(method, at_s):
    watcher = Watcher()
    crashes = (Crash(2, at_s=at_s, down_s=0.004), Crash(3, at_s=at_s + 1e-4))
    plan = small_plan(method, 3, rounds=12, faults=FaultPlan(crashes=crashes, detect_s=0.0005))
    outcome = run(plan, watcher)
    reports = [m["reports"] for _, _, m in watcher.metrics if "reports" in m]
    assert outcome.status == "finished" and len(reports) == 12
    assert reports[-1] == 2 and min(reports) == 1 and torch.isfinite(outcome.results[0].values).all()


def test_v1_leaves_out_a_late_client_with_both_of_its_halves():
    common = {"rounds": 3, "train": {"local_steps": 2}}
    plan = small_plan("splitfed-v1", 3, slowdowns=[1, 1, 1, 100], round_deadline_s=0.01, **common)
    watcher = Watcher()
    found = run(plan, watcher).results[0]
    assert [m["reports"] for _, _, m in watcher.metrics] == [2, 2, 2]
    without = small_plan(
        "splitfed-v1", 3, faults=FaultPlan(crashes=(Crash(3, 0.0),), detect_s=1e-6), **common
    )
    assert near(found, run(without).results[0], 1e-6)


@pytest.mark.parametrize("method", ["split-learning", "splitfed-v1", "splitfed-v2", "parallel-split"])
def test_what_cannot_be_is_refused_by_name(method):
    def refused(**settings):
        plan = small_plan(method, 2, **settings)
        with pytest.raises(ConfigError) as caught:
            plan.method.prepare(plan)
        return str(caught.value)

    assert refused(cut=2) == f"method.{method}.cut = 2: 1 to 1 for this model"
    assert refused(train={"clip_norm": 1.0}).startswith("train.clip_norm = 1.0: none for " + method)
    tiny = DeviceProfile(name="tiny", compute_flops=1e9, memory_bytes_per_s=1e9, memory_bytes=20_000)
    large = DeviceProfile(name="large", compute_flops=1e9, memory_bytes_per_s=1e9, memory_bytes=1 << 30)
    message = refused(profiles=[large, large, tiny])
    assert message.startswith(f"method.{method}.cut = 1: client 2 (tiny) needs ") and message.endswith(
        "20000"
    )


def test_batch_norm_statistics_are_averaged_with_their_layers():
    plan = model_plan("splitfed-v1", "resnet-batch", 3, cut=2)
    fedavg = model_plan("fedavg", "resnet-batch", 3)
    assert near(run(plan).results[0], run(fedavg).results[0], 1e-6)
