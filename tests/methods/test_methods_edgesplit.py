"""EdgeSplit and HSFL: FedAvg whatever the cuts, bytes and seconds as planned, personal fronts."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from methods_reference import batches, sgd
from small import small_plan
from split_lab import near, payload, run
from toy import Watcher, access

from edgefl.devices import DeviceProfile
from edgefl.errors import ConfigError
from edgefl.nodes.node import FleetView
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.parameters import Vector
from edgefl.planning.assign import SplitFleet, edgesplit_plan, hsfl_plan
from edgefl.planning.split import crossing_bytes, front_memory_bytes

MODEL = {"name": "vgg", "channels": (4, 4), "pooled": (1, 2), "hidden": 16}
SPEEDS = (1e8, 1e6, 4e6, 2e7)
LAYERWISE = ["edgesplit", "hsfl-layerwise"]


def device(flops: float, memory_bytes: int = 1 << 30) -> DeviceProfile:
    return DeviceProfile(
        name="board", compute_flops=flops, memory_bytes_per_s=1e15, memory_bytes=memory_bytes
    )


def unequal_plan(method: str, **settings: Any) -> Any:
    """A server and three devices of unlike speed on a thin shared link."""
    common = {
        "profiles": [device(f) for f in SPEEDS],
        "access": [access(1e5, latency_s=0.002), *[access(1e6, latency_s=0.001)] * 3],
        "link_model": "fair",
        "model": MODEL,
        "train": {"batch_size": 16, "local_steps": 5},
    }
    return small_plan(method, 3, **{**common, **settings})


def planned(plan: Any) -> Any:
    view = FleetView(plan, 0, cast(Any, None))
    fleet = SplitFleet.of(view, plan.learner, plan.seed)
    if plan.method.name == "edgesplit":
        return edgesplit_plan(fleet, plan.config)
    return hsfl_plan(fleet, plan.config, moves_front=plan.method.name == "hsfl-layerwise")


@pytest.mark.parametrize("method", LAYERWISE)
def test_a_round_is_fedavgs_whatever_the_cuts(method):
    plan = unequal_plan(method)
    assert len(set(planned(plan).cuts)) > 1
    fedavg = run(small_plan("fedavg", 3, model=MODEL, train={"batch_size": 16, "local_steps": 5})).results[0]
    assert near(run(plan).results[0], fedavg, 1e-6)


@pytest.mark.parametrize("method", LAYERWISE)
def test_one_client_is_plain_sgd(method):
    plan = small_plan(method, 1, rounds=2, model=MODEL, train={"local_steps": 3}, allow_local=False)
    x = sgd(plan, batches(plan, 1, range(6)))
    assert torch.allclose(run(plan).results[0].values, x, rtol=0, atol=1e-6)


def test_hsfl_at_cut_0_is_fedavg_of_whole_models_at_the_server():
    """The examples cross, and the gradient at them, as the time model has it."""
    plan, watcher = unequal_plan("hsfl", plan="raw", rounds=2), Watcher()
    plan.method.prepare(plan)
    outcome = run(plan, watcher)
    common = {"model": MODEL, "train": {"batch_size": 16, "local_steps": 5}, "rounds": 2}
    assert near(outcome.results[0], run(small_plan("fedavg", 3, **common)).results[0], 1e-6)
    for k in (1, 2, 3):
        crossed = 2 * 5 * (2 * 4 * 16 * 64 + 4 * 16)
        assert payload(outcome.traffic.table, "SmashedData", "SmashedGradient", node=k) == crossed
        assert payload(outcome.traffic.table, "Assigned", "FrontBack", node=k) == 0
    for m in (m for _, _, m in watcher.metrics if "round_s" in m):
        assert m["round_s"] == pytest.approx(m["planned_round_s"], rel=0.01)


def test_hsfl_with_one_common_cut_is_splitfed():
    plan = unequal_plan("hsfl-layerwise", plan="common", allow_local=False)
    (cut,) = set(planned(plan).cuts)
    splitfed = unequal_plan("splitfed-v1", cut=cut)
    assert near(run(plan).results[0], run(splitfed).results[0], 1e-6)


@pytest.mark.parametrize("method", [*LAYERWISE, "hsfl"])
def test_bytes_of_each_device_are_as_predicted(method):
    plan = unequal_plan(method, rounds=2)
    table, model = run(plan).traffic.table, plan.learner.model
    for k, cut in enumerate(planned(plan).cuts, start=1):
        front = model.stage(0, cut).counts.parameter_bytes
        crossing = 2 * 5 * crossing_bytes(model, cut, 16)
        assert payload(table, "SmashedData", "SmashedGradient", node=k) == crossing
        # Personal fronts are sent once, at the start, and never come back.
        moved = front if method == "hsfl" else 2 * 2 * front
        assert payload(table, "Front", "FrontBack", "Assigned", "Given", node=k) == moved


@pytest.mark.parametrize("method", [*LAYERWISE, "hsfl"])
def test_bytes_both_ways_by_the_size_of_what_the_blocks_make(method):
    """Up I (A + 4 labels) and, where fronts are shared, P; down I A and P: from the modules themselves."""
    rounds, I, batch = 3, 5, 16
    plan = unequal_plan(method, rounds=rounds)
    table, model = run(plan).traffic.table, plan.learner.model
    for k, cut in enumerate(planned(plan).cuts, start=1):
        front = model.stage(0, cut).build()
        A = 4 * front(torch.zeros(batch, 1, 8, 8)).numel() if cut < len(model.blocks) else 0
        P = 4 * sum(p.numel() for p in front.parameters())
        labels = 4 * batch if A else 0
        fronts_down, fronts_up = (1, 0) if method == "hsfl" else (rounds, rounds)
        up = sum(row[1] for (i, j, _), row in table.items() if (i, j) == (k, 0))
        down = sum(row[1] for (i, j, _), row in table.items() if (i, j) == (0, k))
        assert up == rounds * I * (A + labels) + fronts_up * P
        assert down == rounds * I * A + fronts_down * P


@pytest.mark.parametrize("method", LAYERWISE)
def test_a_device_that_is_gone_is_left_out_of_the_average_and_the_others_weigh_as_ever(method):
    """Without the second device a round is FedAvg's of the other two, by their examples."""
    data = {"name": "dirichlet", "alpha": 0.5}
    faults = FaultPlan(crashes=(Crash(2, 0.0),), detect_s=1e-6)
    plan = unequal_plan(method, rounds=2, faults=faults, data=data)
    expected = plan.learner.model.init()
    for t in range(2):
        ends = {k: sgd(plan, batches(plan, k, range(5 * t, 5 * t + 5)), expected.values) for k in (1, 3)}
        n = {k: len(plan.nodes[k].data) for k in ends}
        expected = expected.with_values(sum(ends[k] * (n[k] / sum(n.values())) for k in ends))
    assert near(run(plan).results[0], expected, 1e-6)


@pytest.mark.parametrize("method", [*LAYERWISE, "hsfl"])
@pytest.mark.parametrize(("link_model", "within"), [("fair", 0.01), ("fifo", 0.05)])
def test_a_round_takes_the_planned_time(method, link_model, within):
    """Under fifo the server's downlink takes messages one after the other, whatever the shares."""
    watcher = Watcher()
    run(unequal_plan(method, link_model=link_model), watcher)
    rounds = [m for _, _, m in watcher.metrics if "round_s" in m]
    assert len(rounds) == 3
    # The first round of personal fronts also brings them.
    for m in rounds[1 if method == "hsfl" else 0 :]:
        assert m["round_s"] == pytest.approx(m["planned_round_s"], rel=within)


def test_a_straggler_is_noticed_and_planned_for():
    slow, never = Watcher(), Watcher()
    slowdowns = [1, 1, 1, 12]
    run(unequal_plan("edgesplit", slowdowns=slowdowns, replan_above=0.1), slow)
    run(unequal_plan("edgesplit", slowdowns=slowdowns), never)
    times = [[m["round_s"] for _, _, m in w.metrics if "round_s" in m] for w in (slow, never)]
    assert times[0][0] == times[1][0] and times[0][1] < times[1][1]
    last = slow.metrics[-1][2]
    assert last["round_s"] == pytest.approx(last["planned_round_s"], rel=0.01)


@pytest.mark.parametrize("method", [*LAYERWISE, "hsfl"])
def test_shares_that_nobody_keeps_change_the_time_and_nothing_else(method):
    kept, shared = Watcher(), Watcher()
    models = [
        run(unequal_plan(method, reserve=flag), w).results[0] for flag, w in ((True, kept), (False, shared))
    ]
    assert near(*models, 1e-6)
    took = [[m["round_s"] for _, _, m in w.metrics if "round_s" in m] for w in (kept, shared)]
    assert all(b < a for a, b in zip(*took, strict=True))


def test_baseline_plans_are_slower():
    def seconds(plan):
        watcher = Watcher()
        run(unequal_plan("edgesplit", plan=plan, rounds=1, allow_local=False), watcher)
        return watcher.metrics[-1][2]["round_s"]

    best = seconds("alternating")
    assert best < seconds("own-cuts") and best < seconds("common-shared") <= seconds("common") * 1.001
    assert best < seconds("middle")


@pytest.mark.parametrize("method", [*LAYERWISE, "hsfl"])
@pytest.mark.parametrize("at_s", [0.0, 0.3, 1.0])
def test_a_device_that_leaves_is_left_out_and_one_that_returns_takes_part(method, at_s):
    watcher = Watcher()
    crashes = (Crash(2, at_s=at_s, down_s=0.4), Crash(3, at_s=at_s + 0.1))
    plan = unequal_plan(method, rounds=6, faults=FaultPlan(crashes=crashes, detect_s=0.05))
    outcome = run(plan, watcher)
    reports = [m["reports"] for _, _, m in watcher.metrics if "reports" in m]
    assert outcome.status == "finished" and reports[-1] == 2 and len(reports) == 6
    assert torch.isfinite(outcome.results[0].values).all()


def test_layers_below_every_cut_are_never_touched_and_each_layer_is_the_mean_of_its_holders():
    plan = unequal_plan("hsfl", rounds=1)
    cuts, model = planned(plan).cuts, plan.learner.model
    assert len(set(cuts)) > 1
    w, start = run(plan).results[0], model.init()
    lowest = min(cuts)
    assert torch.equal(model.cut(w, 0, lowest).values, model.cut(start, 0, lowest).values)
    # Each client's five steps are plain SGD on the whole of front and rear.
    n = {k: len(plan.nodes[k].data) for k in (1, 2, 3)}
    ends = {k: start.with_values(sgd(plan, batches(plan, k, range(5)))) for k in n}
    for l in range(lowest, len(model.blocks)):
        holders = [k for k, cut in enumerate(cuts, start=1) if cut <= l]
        total = sum(n[k] for k in holders)
        mean = sum(model.cut(ends[k], l, l + 1).values * (n[k] / total) for k in holders)
        assert torch.allclose(model.cut(w, l, l + 1).values, mean, rtol=0, atol=1e-6)


def test_a_clients_front_goes_on_from_round_to_round_and_is_its_own():
    watcher = Watcher()
    plan = unequal_plan("hsfl", rounds=2)
    run(plan, watcher)
    fronts = {k: [v for node, _, _, v in watcher.models if node == k] for k in (1, 2, 3)}
    assert all(len(versions) == 2 and not versions[0].equal(versions[1]) for versions in fronts.values())
    same = [k for k, cut in enumerate(planned(plan).cuts, start=1) if cut == planned(plan).cuts[1]]
    assert len({fronts[k][1].values.numpy().tobytes() for k in same}) == len(same)


def test_when_cuts_move_layers_go_along():
    """A straggler is found out after the first round, and gives layers to the server."""
    watcher = Watcher()
    plan = unequal_plan("hsfl", rounds=3, replan_rounds=1, slowdowns=[1, 1, 1, 40])
    outcome = run(plan, watcher)
    first = planned(plan).cuts
    fronts = [v.layout.size for node, _, _, v in watcher.models if node == 3]
    model = plan.learner.model
    sizes = {model.stage(0, cut).layout.size: cut for cut in range(1, len(model.blocks))}
    cuts = [sizes[size] for size in fronts]
    assert cuts[0] == first[2] and cuts[1] < cuts[0]
    given = 4 * model.stage(cuts[1], cuts[0]).layout.size
    assert payload(outcome.traffic.table, "Given", node=3) == given


@pytest.mark.parametrize("method", [*LAYERWISE, "hsfl"])
def test_what_cannot_be_is_refused_by_name(method):
    def refused(**settings):
        plan = unequal_plan(method, **settings)
        with pytest.raises(ConfigError) as caught:
            plan.method.prepare(plan)
        return str(caught.value)

    tiny = [device(1e8), device(1e6, 5_000), device(4e6), device(2e7)]
    assert refused(profiles=tiny).startswith("fleet.devices = 5000: client 1 (board) needs ")
    assert refused(model={"name": "linear"}).startswith("model.name = 'linear': a model of at least 2 blocks")
    assert refused(train={"clip_norm": 1.0}).startswith("train.clip_norm = 1.0: ")
    if method != "edgesplit":
        expected = f"method.{method}.channels = 2: at least 3, one per client"
        assert refused(channels=2) == expected
        expected = f"method.{method}.channels = 9: none where shares are equal"
        assert refused(channels=9, plan="own-cuts") == expected
    plan = unequal_plan(method)
    plan.method.prepare(plan)


def test_a_device_with_little_memory_takes_a_shallow_cut():
    speeds = (1e8, 1e6, 1e9, 1e9)
    free = unequal_plan("edgesplit", profiles=[device(f) for f in speeds])
    assert planned(free).cuts[2] == 4
    learner = free.learner
    for cut in (1, 2, 3):
        room = front_memory_bytes(learner, cut, 16)
        profiles = [*[device(f) for f in speeds[:3]], device(1e9, room)]
        assert planned(unequal_plan("edgesplit", profiles=profiles)).cuts[2] <= cut


def own_mix(plan: Any, k: int, w: Vector) -> tuple[float, float]:
    """Accuracy of a model on all digits of the test set, and with classes weighted by client k's own mix."""
    learner, data = plan.learner, plan.nodes[k].data
    x, y = data.dataset.x_test, data.dataset.y_test
    mine = torch.bincount(data.dataset.y_train[torch.from_numpy(data.indices)], minlength=10) / len(data)
    scratch = learner.scratch(learner.model)
    scratch.load(w)
    right = scratch.forward(x, training=False).argmax(1) == y
    by_class = torch.stack([right[y == c].float().mean() for c in range(10)])
    return float(right.float().mean()), float((by_class * mine).sum())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_personal_fronts_know_their_own_digits_and_averaged_ones_all_of_them(seed):
    """Eight clients with few digits each, 60 rounds of an epoch, the hidden layer at the client."""
    train = {"learning_rate": 0.05, "batch_size": 32, "local_steps": None, "local_epochs": 1}
    common = {"rounds": 60, "train": train, "data": {"name": "dirichlet", "alpha": 0.3}, "seed": seed}
    found = {}
    for method in ("hsfl", "hsfl-layerwise"):
        plan, watcher = small_plan(method, 8, allow_local=False, **common), Watcher()
        w, model = run(plan, watcher).results[0], plan.learner.model
        fronts = {node: v for node, _, _, v in watcher.models if node and method == "hsfl"}
        scores = [
            own_mix(plan, k, model.join(fronts[k], model.cut(w, 1, 2)) if fronts else w) for k in range(1, 9)
        ]
        found[method] = [sum(column) / 8 for column in zip(*scores, strict=True)]
    (all_personal, own_personal), (all_averaged, own_averaged) = found["hsfl"], found["hsfl-layerwise"]
    assert own_personal >= own_averaged
    assert all_averaged >= all_personal + 0.2


@pytest.mark.parametrize(
    "method",
    [
        "split-learning",
        "split-learning-u",
        "splitfed-v1",
        "splitfed-v2",
        "parallel-split",
        "hsfl",
        *LAYERWISE,
    ],
)
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_server_that_returns_ends_as_if_undisturbed(method, share):
    undisturbed = run(unequal_plan(method))
    whole = undisturbed.time_s
    faults = FaultPlan(crashes=(Crash(0, whole * share, down_s=whole / 10),), detect_s=whole / 50)
    found = run(unequal_plan(method, faults=faults))
    assert found.status == "finished" and found.time_s > whole
    assert near(found.results[0], undisturbed.results[0])
