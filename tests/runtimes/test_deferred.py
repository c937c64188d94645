"""Deferred, batched execution changes nothing: programs see what they would see if work were done at once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from small import run_small
from toy import Watcher, access, toy_plan

from edgefl.errors import EdgeflError
from edgefl.learning.cost import Cost
from edgefl.learning.work import Call, Work
from edgefl.nodes import Back, Gone, Message
from edgefl.nodes.plan import Crash, FaultPlan, Partition
from edgefl.runtimes.virtual import VirtualRuntime
from edgefl.runtimes.virtual.processor import Workshop

NUM_NODES = 4
STEPS = 25


@dataclass(frozen=True)
class Share(Message):
    max_size = {"values": 100_000}
    step: int
    values: torch.Tensor


@dataclass(frozen=True)
class Token(Message):
    newest_by = ("sender",)
    step: int


@dataclass(frozen=True, eq=False)
class Scaled(Work):
    """x times two plus `shift`, with others of its kind at once; fails for a shift of 7."""

    x: torch.Tensor
    shift: int
    seconds: float

    def cost(self, learner):
        return Cost(seconds=self.seconds)

    def run(self, learner):
        if self.shift == 7:
            raise ZeroDivisionError("a shift of 7")
        return self.x * 2 + self.shift


class Together:
    """An executor that takes all Scaled at once, and gives each its own result."""

    num_workers, threads = 0, None
    group = 1000

    def run(self, works):
        return [_attempt(work) for work in works]

    def group_key(self, work):
        return "scaled" if isinstance(work, Scaled) else None

    def describe(self):
        return {"executor": "together"}


def _attempt(work):
    try:
        return work.run(None)
    except Exception as error:
        return error


class EagerWorkshop(Workshop):
    """Carries work out in the instant in which it is asked for."""

    def admit(self, item):
        item.result, item.carried_out = self._carry_out([item.work])[0], True
        self.batches += 1
        self.items += 1


class EagerRuntime(VirtualRuntime):
    def __init__(self, plan, observer, executor):
        super().__init__(plan, observer, executor)
        self._workshop = EagerWorkshop(executor)
        for state in self.states.values():
            state.processor._workshop = self._workshop


def _sum(values, scale):
    return sum(values) * scale


class Wanderer:
    """A program that draws each of its steps; `seen` is all that it learns, and mutated on the way."""

    def __init__(self, node):
        self.node = node
        self.x = torch.full((8,), float(node.id)) if node.saved is None else node.saved["x"]
        self.seen = [float(node.life)]

    async def run(self):
        moves = (
            self.compute_then_mutate, self.train, self.train_and_cancel, self.exchange, self.send_and_cancel,
            self.race, self.wait, self.several, self.check,
        )  # fmt: skip
        for step in range(STEPS):
            rng = self.node.rng("move", self.node.life, step)
            try:
                await moves[rng.integers(len(moves))](step, rng)
            except ZeroDivisionError:  # a child's work failed while this one waited elsewhere
                self.note(-9)
            self.node.record(step=step, seen=self.seen[-1], size=float(self.x.sum()))
            if step % 10 == 9:
                await self.node.save(step=step, x=self.x)
        return self.seen, self.x.tolist()

    def note(self, value):
        self.seen.append(float(value))

    def scaled(self, rng):
        return self.node.compute(Scaled(self.x, int(rng.integers(8)), float(rng.uniform(0.1, 2.0))))

    async def settle(self, task):
        """Take a task's value, or note that its work failed, or that a sibling's did."""
        try:
            self.x = (await task) / 3
        except ZeroDivisionError:
            self.note(-7)
        except EdgeflError:
            self.note(-8)

    async def compute_then_mutate(self, step, rng):
        values = [float(step), 2.0]
        task = self.node.start(self.node.compute(Call(_sum, (values, 0.5), Cost(seconds=0.5))))
        values.append(1000.0)
        self.x = self.x + 1
        self.note(await task)

    async def train(self, step, rng):
        task = self.node.start(self.guarded(rng))
        self.x = torch.zeros(8)
        await self.settle(task)

    async def guarded(self, rng):
        return await self.scaled(rng)

    async def train_and_cancel(self, step, rng):
        task = self.node.start(self.scaled(rng))
        other = self.node.start(self.node.sleep(0.3))
        await other
        if task.done:
            return
        task.cancel()
        try:
            await task
        except EdgeflError:
            self.note(-1)

    async def exchange(self, step, rng):
        to = int(rng.integers(NUM_NODES))
        self.node.send(to, Share(step, self.x.repeat(int(rng.integers(1, 3000)))))
        m = await self.node.receive(Share, timeout_s=float(rng.uniform(0.1, 1.0)))
        self.note(-2 if m is None else m.values.sum() + m.sender)

    async def send_and_cancel(self, step, rng):
        others = [j for j in range(NUM_NODES) if j != self.node.id]
        transfer = self.node.send(others, Share(step, torch.ones(20_000)))
        self.node.send(others, Token(step))
        await self.node.sleep(float(rng.uniform(0, 0.2)))
        self.note(transfer.done)
        transfer.cancel()

    async def race(self, step, rng):
        task = self.node.start(self.scaled(rng))
        winner = await self.node.first(
            self.node.receive(Token, Gone, Back), task, timeout_s=float(rng.uniform(0.1, 3.0))
        )
        if winner is task:
            await self.settle(task)
        elif winner is None:
            self.note(-3)
        else:
            self.note(winner.sender)
            task.cancel()

    async def wait(self, step, rng):
        await self.node.sleep(float(rng.uniform(0, 0.5)))
        self.note(sum(m.step for m in self.node.take(Token)))

    async def several(self, step, rng):
        """Three items queue; the parent goes on after the second, which ends the third."""
        first, second, _ = (self.node.start(self.scaled(self.node.rng("item", step, k))) for k in range(3))
        await self.settle(first)
        await self.settle(second)

    async def check(self, step, rng):
        self.note(self.node.now())
        self.note(sum(self.node.fleet.alive(j) for j in range(NUM_NODES)))


async def wanderer(node):
    return await Wanderer(node).run()


def wandering(seed):
    """A plan of wanderers, with crashes and a partition on every second seed."""
    faults = FaultPlan(compute_jitter=0.3)
    if seed % 2:
        crashes = (Crash(1, at_s=3.0 + seed % 5, down_s=2.0), Crash(2, at_s=6.0))
        partition = Partition(frozenset({0, 3}), at_s=4.0, for_s=1.5)
        faults = FaultPlan(crashes, (partition,), detect_s=0.4, compute_jitter=0.3)
    model = ("fair", "local-fair", "fifo")[seed % 3]
    links = access(2e5, latency_s=0.01, jitter=0.5)
    return toy_plan(
        [wanderer] * NUM_NODES, (Share, Token), seed=seed, access=links, link_model=model, faults=faults
    )


def trace(runtime):
    outcome, watcher = runtime.run(), runtime.observer
    return (
        outcome.results, outcome.time_s, outcome.num_events, outcome.traffic.table, outcome.busy_s,
        outcome.dropped, watcher.spans, watcher.events, watcher.metrics,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_programs_see_the_same_whenever_their_work_is_carried_out(seed):
    deferred = VirtualRuntime(wandering(seed), Watcher(), Together())
    eager = EagerRuntime(wandering(seed), Watcher(), Together())
    assert trace(deferred) == trace(eager)
    assert deferred._workshop.items > deferred._workshop.batches  # some were carried out together
    assert deferred._workshop.items < eager._workshop.items  # and those that were cancelled never


def test_wanderers_do_all_that_they_can():
    """The random programs reach what they are there for: failures, cancellations, time-outs, messages."""
    seen = set()
    for seed in range(60):
        for result in VirtualRuntime(wandering(seed), Watcher(), Together()).run().results.values():
            seen.update(result[0])
    assert {-9.0, -8.0, -7.0, -3.0, -2.0, -1.0, 0.0, 1.0} <= seen


UNEVEN = {"name": "dirichlet", "alpha": 0.3, "min_examples": 3}
METHODS = {
    "fedavg": {"client_fraction": 0.6, "over_selection": 0.3},
    "fedprox": {"proximal_mu": 0.1},
    "fedasync": {},
    "d-psgd": {},
    "ad-psgd": {},
    "divshare": {"recipients": 2},
    "ring-allreduce": {},
    "split-learning": {},
    "local-only": {},
    "centralized": {},
}


def small_trace(method, executor):
    watcher = Watcher()
    outcome = run_small(
        method, 6, rounds=6, data=UNEVEN, executor=executor, watcher=watcher,
        train={"momentum": 0.5}, access=access(1e7, latency_s=1e-4, jitter=0.5),
        faults=FaultPlan(compute_jitter=0.5), link_model="fair", **METHODS[method],
    )  # fmt: skip
    return outcome, watcher


def what_happened(outcome, watcher):
    return outcome.time_s, outcome.num_events, outcome.traffic.table, watcher.spans, watcher.events


@pytest.mark.parametrize("method", ["fedavg", "d-psgd", "ad-psgd", "fedasync", "divshare"])
def test_batched_and_inline_agree_on_uneven_data(method):
    (one, ones), (other, others) = (small_trace(method, executor) for executor in ("batched", "inline"))
    assert what_happened(one, ones) == what_happened(other, others)
    assert len(ones.models) == len(others.models) > 0
    for a, b in zip(ones.models, others.models, strict=True):
        assert a[:3] == b[:3] and torch.allclose(a[3].values, b[3].values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_one_plan_twice_leaves_one_trace(method):
    (one, ones), (other, others) = (small_trace(method, "auto") for _ in range(2))
    assert what_happened(one, ones) == what_happened(other, others)
    assert str(ones.metrics) == str(others.metrics)
    assert all(a[3].equal(b[3]) for a, b in zip(ones.models, others.models, strict=True))
