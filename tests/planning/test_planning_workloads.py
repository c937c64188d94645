import dataclasses

import pytest

from edgefl.data import LocalData
from edgefl.devices import DeviceProfile
from edgefl.errors import ConfigError
from edgefl.learning import Learner, ModelConfig, Problem, TrainConfig, Workload, build_model
from edgefl.learning.measuring import made_data
from edgefl.network import Access, NetworkPlan, make_topology
from edgefl.nodes.plan import NodeSpec
from edgefl.planning.workloads import AssignConfig, Fleet, assign, assigned, refuse_too_large, replanner

DIGITS = Problem("classification", (8, 8), 10)
MODEL = build_model(ModelConfig(name="mlp", hidden=(32,)), DIGITS, 0)


WIDTHS = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)


def profile(flops: float, overhead_s: float = 0.0, memory_bytes: int = 10**9) -> DeviceProfile:
    return DeviceProfile(
        name="x", compute_flops=flops, memory_bytes_per_s=1e15, memory_bytes=memory_bytes,
        step_overhead_s=overhead_s,
    )  # fmt: skip


def fleet(profiles, *, batch=16, steps=10, examples=400, rate=1e9, slowdowns=None) -> Fleet:
    """A server and one device per profile, in a star."""
    data: LocalData = made_data(DIGITS, examples)
    workload = Workload(batch_size=batch, steps=steps)
    nodes = [NodeSpec("server", profile(1e12), workload)]
    slow = slowdowns or [1.0] * len(profiles)
    nodes += [NodeSpec("client", p, workload, data, s) for p, s in zip(profiles, slow, strict=True)]
    access = (Access(up_bytes_per_s=rate, down_bytes_per_s=rate, latency_s=0.01),) * len(nodes)
    network = NetworkPlan(make_topology("star", len(nodes), 0), access)
    return Fleet.of(nodes, network, Learner(MODEL, TrainConfig(batch_size=batch)), WIDTHS)


def test_uniform_leaves_workloads_and_says_who_waits():
    found = assign(fleet([profile(1e6), profile(2e6)]), AssignConfig())
    assert {s.workload for s in found.shares.values()} == {Workload(batch_size=16, steps=10)}
    assert set(found.shares) == {1, 2} and found.groups == ((1, 2),)
    assert found.shares[1].compute_s == pytest.approx(2 * found.shares[2].compute_s)
    assert found.round_s == found.shares[1].total_s and found.shares[1].idle == 0
    transfer = 2 * (MODEL.counts.parameter_bytes / 1e9 + 0.02)
    assert found.shares[2].transfer_s == pytest.approx(transfer)
    assert found.shares[2].idle == pytest.approx(1 - found.shares[2].total_s / found.round_s)


def test_proportional_batches_go_with_speed_and_keep_the_examples():
    found = assign(
        fleet([profile(1e6), profile(2e6), profile(5e6)]), AssignConfig(policy="proportional-batch")
    )
    sizes = [found.shares[i].workload.batch_size for i in (1, 2, 3)]
    assert sum(sizes) >= 48 and sizes == [6, 12, 30]
    assert max(s.idle for s in found.shares.values()) < 0.05
    uniform = assign(fleet([profile(1e6), profile(2e6), profile(5e6)]), AssignConfig())
    assert found.round_s == pytest.approx(uniform.round_s * 6 / 16, rel=0.05)


def test_batches_stay_within_the_data():
    slow_and_fast = fleet([profile(1e6), profile(1e9)], batch=30, examples=40)
    found = assign(slow_and_fast, AssignConfig(policy="proportional-batch"))
    assert [found.shares[i].workload.batch_size for i in (1, 2)] == [20, 40]


def test_proportional_batches_need_a_number_of_steps():
    with pytest.raises(ConfigError, match=r"train\.local_steps"):
        assign(fleet([profile(1e6)], steps=None), AssignConfig(policy="proportional-batch"))


def test_as_many_steps_as_fit_before_the_deadline():
    devices = fleet([profile(1e6), profile(2e6), profile(5e6)])
    one_s = devices.compute_s(1, Workload(batch_size=16, steps=1))
    transfer_s = devices.transfer_s(1)
    config = AssignConfig(policy="deadline", deadline_s=transfer_s + 4.5 * one_s)
    found = assign(devices, config)
    assert [found.shares[i].workload.steps for i in (1, 2, 3)] == [4, 9, 22]
    assert found.round_s <= config.deadline_s * (1 + 1e-9)
    capped = assign(devices, config.model_copy(update={"max_steps": 8}))
    assert [capped.shares[i].workload.steps for i in (1, 2, 3)] == [4, 8, 8]


def test_without_a_deadline_it_is_the_slowest_devices_round():
    devices = fleet([profile(1e6), profile(3e6)])
    uniform = assign(devices, AssignConfig())
    found = assign(devices, AssignConfig(policy="deadline"))
    assert [found.shares[i].workload.steps for i in (1, 2)] == [10, 30]
    assert found.round_s == pytest.approx(uniform.round_s)


def test_a_deadline_that_nobody_could_keep_is_refused_with_the_figure():
    with pytest.raises(
        ConfigError, match=r"assign\.deadline_s = 0\.01: at least 0\.\d+ for one step of node 1"
    ):
        assign(fleet([profile(1e6)]), AssignConfig(policy="deadline", deadline_s=0.01))


def test_groups_are_of_like_speed_the_fastest_first():
    speeds = [1e6, 1e8, 1.1e6, 0.9e8, 1e6, 1.05e8]
    found = assign(fleet([profile(s) for s in speeds], rate=1e12), AssignConfig(policy="cluster", groups=2))
    assert found.groups == ((2, 4, 6), (1, 3, 5))
    one_each = assign(fleet([profile(s) for s in speeds]), AssignConfig(policy="cluster", groups=9))
    assert sorted(len(g) for g in one_each.groups) == [1] * 6


def test_slow_nodes_are_planned_as_slow_as_they_are():
    found = assign(fleet([profile(1e6), profile(1e6)], slowdowns=[1.0, 3.0]), AssignConfig(policy="deadline"))
    assert [found.shares[i].workload.steps for i in (1, 2)] == [30, 10]


def test_slow_devices_get_narrower_models():
    devices = fleet([profile(1e6), profile(1e6), profile(1e6), profile(0.55e6), profile(0.2e6)], rate=1e12)
    found = assign(devices, AssignConfig(policy="width"))
    widths = [found.shares[i].workload.width for i in range(1, 6)]
    assert widths == [1.0, 1.0, 1.0, 0.5, 0.125]
    half = found.shares[4]
    assert half.compute_s < found.shares[1].compute_s
    # Half of the hidden units: half of the products, the outputs' biases aside.
    assert half.compute_s == pytest.approx(
        devices.compute_s(4, Workload(batch_size=16, steps=10)) / 2, rel=0.02
    )


def test_overheads_alone_are_no_reason_for_a_smaller_batch():
    """Batches of one would save nothing: examples are nearly free, and the rate goes with them."""
    devices = fleet([profile(1e12, overhead_s=0.01), profile(1e12, overhead_s=0.001)])
    found = assign(devices, AssignConfig(policy="proportional-batch"))
    assert [found.shares[i].workload.batch_size for i in (1, 2)] == [64, 64]
    assert [found.shares[i].workload.rate_factor for i in (1, 2)] == [4.0, 4.0]
    uniform = assign(devices, AssignConfig())
    assert found.round_s <= uniform.round_s * 1.02


def test_the_rate_goes_with_the_batch():
    found = assign(fleet([profile(1e6), profile(5e6)]), AssignConfig(policy="proportional-batch"))
    for share in found.shares.values():
        assert share.workload.rate_factor == share.workload.batch_size / 16
    held = fleet([profile(1e6)], examples=10)
    assert assign(held, AssignConfig(policy="proportional-batch")).shares[1].workload.rate_factor == 1.0


def test_a_plan_made_anew_only_when_times_drift():
    devices = fleet([profile(1e6), profile(1e6)])
    config = AssignConfig(policy="deadline", replan_above=0.2)
    now = assign(devices, config)
    replan, was, planned_s = replanner(devices, config, now), now.shares[1].workload, now.shares[1].compute_s
    assert replan(1, was, planned_s * 1.1) is None
    slower = replan(1, was, planned_s * 2.5)
    assert slower.steps == 4
    # Carried out as planned, the new plan holds; the device's old speed brings the old plan back.
    assert replan(1, slower, devices.compute_s(1, slower) * 2.5) is None
    assert replan(1, slower, devices.compute_s(1, slower)).steps == was.steps


def test_a_batch_follows_the_speed_and_the_rate_the_batch():
    devices = fleet([profile(1e6), profile(2e6)])
    config = AssignConfig(policy="proportional-batch", replan_above=0.2)
    now = assign(devices, config)
    replan, share = replanner(devices, config, now), now.shares[2]
    slower = replan(2, share.workload, share.compute_s * 2)
    assert slower.batch_size == pytest.approx(share.workload.batch_size / 2, abs=1)
    assert slower.rate_factor == pytest.approx(slower.batch_size / 16)
    # Where not even batches of one would fit the batch stays.
    assert replan(2, share.workload, share.compute_s * 1000) is None


def test_only_policies_that_plan_a_time_can_be_replanned():
    devices, config = fleet([profile(1e6)]), AssignConfig(replan_above=0.2)
    with pytest.raises(ConfigError, match=r"assign\.replan_above = 0\.2: policy deadline or"):
        replanner(devices, config, assign(devices, config))
    assert replanner(devices, AssignConfig(policy="cluster"), assign(devices, AssignConfig())) is None


def test_only_nodes_with_data_get_a_share():
    devices = fleet([profile(1e6), profile(2e6)])
    new = assigned(devices.nodes, assign(devices, AssignConfig(policy="deadline")))
    assert new[0] is devices.nodes[0] and [n.workload.steps for n in new[1:]] == [10, 20]


def test_what_does_not_fit_is_refused_by_name_with_both_figures():
    devices = fleet([profile(1e6), profile(1e6, memory_bytes=20_000)])
    planned = assign(devices, AssignConfig())
    refuse_too_large(devices, dataclasses.replace(planned, shares={1: planned.shares[1]}))
    with pytest.raises(
        ConfigError, match=r"client 2 \(x\) needs 0\.0 MB for mlp/2410 at batch size 16 and has 0\.0 MB"
    ):
        refuse_too_large(devices, planned)
