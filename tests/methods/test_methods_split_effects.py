"""What planned cuts and shares gain, by the round times of whole runs in virtual time, without the training.

Accuracy per round is that of FedAvg whatever the cuts, which other tests hold; so the ratio of round times is
the effect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small import small_plan
from toy import Watcher, access

from edgefl.data import Dataset, LocalData
from edgefl.devices import DeviceProfile
from edgefl.learning.executors import Inline
from edgefl.learning.unlearned import Unlearned
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.runtimes.virtual import VirtualRuntime

STEPS, BATCH = 10, 32
EXAMPLES = STEPS * BATCH


def pixels(clients: int) -> Dataset:
    """28 x 28 zeros: only their shape counts here."""
    x, y = torch.zeros(EXAMPLES * clients, 1, 28, 28), torch.arange(EXAMPLES * clients) % 10
    return Dataset("pixels", "classification", x, y, x[:10], y[:10], 10)


def board(gflops: float) -> DeviceProfile:
    return DeviceProfile(
        name="board", compute_flops=gflops * 1e9, memory_bytes_per_s=1e15, memory_bytes=1 << 34
    )


def fleet_plan(
    method: str, speeds: list[float], mbit: float, model: dict[str, Any], **config: Any
) -> RunPlan:
    """Two rounds of ten batches of 32 on boards of so many GFLOP/s, the server's first, and its link."""
    clients = len(speeds) - 1
    data = pixels(clients)
    own = [range(EXAMPLES * k, EXAMPLES * (k + 1)) for k in range(clients)]
    parts = [LocalData(data, torch.tensor(list(r)).numpy(), k + 1, 0) for k, r in enumerate(own)]
    return small_plan(
        method, clients, rounds=2, dataset=data, parts=parts, link_model="fair", model=model,
        profiles=[board(f) for f in speeds], access=[access(mbit * 1e6 / 8), *[access(1e9)] * clients],
        train={"learning_rate": 0.05, "batch_size": BATCH, "local_steps": STEPS}, **config,
    )  # fmt: skip


def round_s(method: str, speeds: list[float], mbit: float, model: dict[str, Any], **config: Any) -> float:
    """Seconds of the second round, which needs no plan and no first fronts; speeds: the server's first."""
    plan = fleet_plan(method, speeds, mbit, model, **config)
    return second_round_s(plan, Unlearned(plan.learner))[0]


def second_round_s(plan: RunPlan, executor: Any) -> tuple[float, Vector]:
    """Its seconds, and the model at its end."""
    watcher = Watcher()
    last = VirtualRuntime(plan, watcher, executor).run().results[0]
    ends = {step: time_s for node, time_s, step, _ in watcher.models if node == 0}
    return ends[2] - ends[1], last


WHOLE = {"name": "vgg", "channels": (32, 32, 64, 64, 128), "hidden": 128}
QUARTER = {"name": "vgg", "channels": (8, 8, 16, 16, 32), "hidden": 32}


@pytest.mark.slow
@pytest.mark.parametrize("mbit", [20, 100, 500])
def test_edgesplit_against_its_baselines(mbit):
    """Six boards of 2, 2, 20, 20, 60, 60 GFLOP/s, 100 of the server for each, which queues for nobody."""
    fleet = [600, 2, 2, 20, 20, 60, 60]
    plans = ("alternating", "own-cuts", "common-shared", "common", "middle")
    found = {plan: round_s("edgesplit", fleet, mbit, WHOLE, plan=plan) for plan in plans}
    found["fedavg"] = round_s("fedavg", fleet, mbit, WHOLE)
    splitfed = {cut: round_s("splitfed-v1", fleet, mbit, WHOLE, cut=cut) for cut in range(1, 7)}
    found["splitfed"] = min(splitfed.values())
    shared = round_s("edgesplit", fleet, mbit, WHOLE, reserve=False)
    assert shared < min(found.values())
    print(mbit, {name: round(seconds, 2) for name, seconds in found.items()}, round(shared, 2))
    best = found["alternating"]
    assert best <= min(found.values()) * 1.001
    if mbit == 100:
        assert found["middle"] / best >= 1.9 and found["common"] / best >= 1.3
        assert found["fedavg"] / best >= 1.9
    if mbit == 20:
        assert 1 < found["fedavg"] / best <= 1.2


@pytest.mark.slow
def test_edgesplit_in_a_quarter_of_the_width_with_real_training():
    """1.3 times the best common cut at equal shares, and FedAvg's model, on noise for pixels."""
    fleet, mbit = [37.5, 0.125, 0.125, 1.25, 1.25, 3.75, 3.75], 25
    times = {}
    for name, config in (("edgesplit", {}), ("fedavg", {}), ("common", {"plan": "common"})):
        plan = fleet_plan("fedavg" if name == "fedavg" else "edgesplit", fleet, mbit, QUARTER, **config)
        noise = torch.randn(
            plan.nodes[1].data.dataset.x_train.shape, generator=torch.Generator().manual_seed(0)
        )
        dataset = replace(plan.nodes[1].data.dataset, x_train=noise)
        nodes = [
            s if s.data is None else replace(s, data=replace(s.data, dataset=dataset)) for s in plan.nodes
        ]
        plan = replace(plan, nodes=tuple(nodes))
        times[name] = second_round_s(plan, Inline(plan.learner))
    print({name: round(seconds, 2) for name, (seconds, _) in times.items()})
    split, whole, start = times["edgesplit"][1], times["fedavg"][1], plan.learner.model.init()
    print((split - whole).norm() / whole.norm(), (whole - start).norm() / whole.norm())
    assert (split - whole).norm() < 1e-5 * whole.norm() and (whole - start).norm() > 0.01 * whole.norm()
    best = times["edgesplit"][0]
    assert times["common"][0] / best >= 1.3 and times["fedavg"][0] / best >= 1.9


@pytest.mark.slow
@pytest.mark.parametrize("mbit", [5, 20, 100])
def test_hsfl_against_its_baselines(mbit):
    """Eight boards of 0.125, 0.5 and 2 GFLOP/s, 10 of the server in all."""
    fleet = [10, *[0.125] * 4, *[0.5] * 2, *[2] * 2]
    hsfl = round_s("hsfl", fleet, mbit, QUARTER)
    plans = ("common", "common-equal", "own-cuts", "random")
    shared, equal, own, random = (round_s("hsfl", fleet, mbit, QUARTER, plan=plan) for plan in plans)
    splitfed = [
        min(round_s(method, fleet, mbit, QUARTER, cut=cut) for cut in range(1, 7))
        for method in ("splitfed-v1", "splitfed-v2")
    ]
    layerwise = round_s("hsfl-layerwise", fleet, mbit, QUARTER, allow_local=False)
    turns = min(round_s("split-learning", fleet, mbit, QUARTER, cut=cut) for cut in range(1, 7))
    fedavg = round_s("fedavg", fleet, mbit, QUARTER)
    free = [round_s(m, fleet, mbit, QUARTER, reserve=False) for m in ("hsfl", "hsfl-layerwise")]
    found = (hsfl, shared, equal, own, random, layerwise, turns, fedavg, *splitfed, *free)
    print(mbit, [round(seconds, 2) for seconds in found])
    assert hsfl <= min(shared, equal, own, random) * 1.001 and layerwise <= 1.05 * hsfl
    assert min(free) < min(splitfed)
    if mbit == 20:
        assert equal / hsfl >= 1.35 and shared / hsfl >= 1.2 and turns / hsfl >= 3
    if mbit == 5:
        assert shared / hsfl < 1.01
