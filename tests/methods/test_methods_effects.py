"""What two papers claim, on digits in virtual time: no wait for a slow worker, no wait for a slow uplink."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from methods_reference import with_programs
from small import digits, small_plan
from torch import Tensor
from toy import Watcher, access

from edgefl.data import Batch
from edgefl.learning.cost import duration_s
from edgefl.learning.executors import make_executor
from edgefl.learning.work import Gradient, LocalSGD
from edgefl.methods.decentralized.divshare import Fragment, _drain, _fresh_queue, aggregate, index_sets
from edgefl.nodes import Message
from edgefl.nodes.plan import FaultPlan
from edgefl.runtimes.virtual import VirtualRuntime

pytestmark = pytest.mark.slow
MODEL_BYTES = 4 * 4810


def curve(plan, every_s, judge):
    """[(time in units of every_s, judge(latest models))] of a run, where all nodes have published."""
    watcher = Watcher()
    VirtualRuntime(plan, watcher, make_executor("auto", plan.learner)).run()
    latest, points, due = {}, [], 1
    for node, time_s, _, x in watcher.models:
        while time_s > due * every_s:
            if len(latest) == len(plan.nodes):
                points.append((due, judge(plan.learner, list(latest.values()))))
            due += 1
        latest[node] = x
    return points


def time_to(points, accuracy):
    """When a curve first reaches an accuracy; infinity if it does not."""
    return min((time for time, reached in points if reached >= accuracy), default=float("inf"))


def accuracy(learner, x):
    found = learner.measure(x, Batch(digits().x_test, digits().y_test))
    return found.correct / found.num_targets


def of_the_mean(learner, models):
    mean = torch.stack([x.values for x in models]).mean(0)
    return accuracy(learner, models[0].with_values(mean))


def mean_of_each(learner, models):
    return sum(accuracy(learner, x) for x in models) / len(models)


def test_ad_psgd_does_not_wait_for_a_slow_worker():
    """8 nodes, one 5 times slower; a model's transfer, and the whole all-reduce, take a tenth of a step."""
    slow = [5.0] + [1.0] * 7
    probe = small_plan("ad-psgd", 8)
    spec = probe.nodes[1]
    work = Gradient(probe.learner.model.init(), spec.data, 0, spec.workload)
    step_s = duration_s(work.cost(probe.learner), spec.profile)
    one_transfer = access(MODEL_BYTES / (0.1 * step_s), 1e12)
    one_ring = access(2 * 7 / 8 * MODEL_BYTES / (0.1 * step_s), 1e12)
    reached = {}
    for method, link in (("ad-psgd", one_transfer), ("ring-allreduce", one_ring)):
        plan = small_plan(method, 8, rounds=None, time_s=500 * step_s, slowdowns=slow, access=link)
        reached[method] = curve(plan, 4 * step_s, of_the_mean)
    for target in (0.85, 0.9):
        assert 3 * time_to(reached["ad-psgd"], target) <= time_to(reached["ring-allreduce"], target) < 1e9


# --- DivShare and what it is compared with


@dataclass(frozen=True)
class Push(Message):
    newest_by = ("sender",)
    first: bool
    values: Tensor


@dataclass(frozen=True)
class Wake(Message):
    newest_by = ("sender",)


async def swift_variant(node):
    """Whole models to J peers after each phase, through a queue that is never emptied."""
    S = index_sets(node.model.layout, 1, node.shared_rng("divshare fragments"))
    others = [j for j in node.fleet.ids() if j != node.id]
    x, queue, sender = node.model.init(), [], None
    for it in node.rounds():
        x = (await node.compute(LocalSGD(x, node.data, it, node.workload))).parameters
        queue += _fresh_queue(node, node.config, others, S, x, it)
        if sender is None or sender.done:
            sender = node.start(_drain(node, queue))
        x = aggregate(x, node.take(Fragment), S)
        node.publish(x, step=it + 1)


class ADPSGDVariant:
    """J/2 pushes of the whole model after each phase, each answered; the queue is never emptied."""

    def __init__(self, node):
        self.node, self.queue, self.arrived = node, [], {}
        self.latest = node.model.init()

    async def run(self):
        node = self.node
        node.start(self.answer())
        node.start(self.send())
        others = [j for j in node.fleet.ids() if j != node.id]
        x = self.latest
        for it in node.rounds():
            x = (await node.compute(LocalSGD(x, node.data, it, node.workload))).parameters
            self.latest = x
            for to in node.rng("pushes", it).choice(others, node.config.recipients // 2):
                self.put(int(to), Push(True, x.values))
            models = [x.values, *(self.arrived[j] for j in sorted(self.arrived))]
            self.arrived.clear()
            x = x.with_values(torch.stack(models).mean(0))
            node.publish(x, step=it + 1)

    def put(self, to, message):
        self.queue.append((to, message))
        self.node.send(self.node.id, Wake())

    async def answer(self):
        while True:
            m = await self.node.receive(Push)
            self.arrived[m.sender] = m.values
            if m.first:
                self.put(m.sender, Push(False, self.latest.values))

    async def send(self):
        while True:
            await self.node.receive(Wake)
            while self.queue:
                await self.node.send(*self.queue.pop(0))


async def ad_psgd_variant(node):
    await ADPSGDVariant(node).run()


PHASES = 90


@cache
def phases_to_three_quarters(seed, variant, fraction):
    """Phases until the mean of 16 nodes' own accuracies is 0.75; 8 of them have a thin uplink."""
    fast, slow = (access(MODEL_BYTES / seconds, 1e9) for seconds in (0.083, 0.417))
    setting = {
        "seed": seed,
        "train": {"learning_rate": 0.05, "batch_size": 8, "local_steps": 10},
        "data": {"name": "shards", "shards_per_node": 2},
        "fragment_fraction": fraction,
    }
    probe = small_plan("divshare", 16, **setting)
    spec = probe.nodes[0]
    work = LocalSGD(probe.learner.model.init(), spec.data, 0, spec.workload)
    phase_s = duration_s(work.cost(probe.learner), spec.profile)
    plan = small_plan(
        "divshare", 16, rounds=None, time_s=PHASES, access=[slow] * 8 + [fast] * 8,
        slowdowns=[1 / phase_s] * 16, faults=FaultPlan(compute_jitter=0.05), **setting,
    )  # fmt: skip
    if variant is not None:
        plan = with_programs(plan, peer=variant)
        messages = (*plan.method.messages, Push, Wake)
        plan = replace(plan, method=replace(plan.method, messages=messages))
    return time_to(curve(plan, 1.0, mean_of_each), 0.75)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fragments_are_sooner_than_whole_models_over_thin_uplinks(seed):
    divshare = phases_to_three_quarters(seed, None, 0.1)
    assert divshare <= 50
    assert phases_to_three_quarters(seed, None, 1.0) >= 1.2 * divshare


@pytest.mark.parametrize("variant", [swift_variant, ad_psgd_variant])
@pytest.mark.parametrize("seed", [2, 3])
def test_divshare_is_twice_as_soon_as_queues_that_are_never_emptied(seed, variant):
    assert phases_to_three_quarters(seed, variant, 1.0) >= 2 * phases_to_three_quarters(seed, None, 0.1)
