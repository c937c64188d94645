"""Methods under random crashes, returns and partitions: each run ends, and none is stuck."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small import small_plan
from toy import Watcher, access

from edgefl.errors import RunError
from edgefl.keyed import generator
from edgefl.learning.work import Gradient, GradientResult, Trained
from edgefl.nodes.plan import Crash, FaultPlan, Partition
from edgefl.nodes.registry import find_method
from edgefl.runtimes.virtual import VirtualRuntime

NUM_DEVICES = 6
HORIZON_S = 0.01
ROUNDS = {"fedavg": 12, "fedasync": 12, "d-psgd": 12, "ad-psgd": 40, "divshare": 60}
"""So many that most faults fall within the run."""
CONFIG = {"divshare": {"recipients": 2, "fragment_fraction": 0.5}}
WAYS_TO_END = {("finished", "the method ended"), ("stopped", "time limit")}


def drawn_faults(method, seed):
    """Crashes, returns and partitions as far as the method tolerates them; two devices always stay."""
    tolerates = find_method(method).tolerates
    rng = generator(seed, "faults")
    first = int(find_method(method).has_server)
    devices = rng.permutation(range(first, NUM_DEVICES + first)).tolist()
    crashes = []
    for node in devices[2:] if tolerates.crashes else []:
        for _ in range(rng.integers(3)):
            returns = tolerates.returns and rng.random() < 0.7
            down_s = float(rng.uniform(0, HORIZON_S / 2)) if returns else None
            crashes.append(Crash(node, float(rng.uniform(0, HORIZON_S)), down_s))
    if first and tolerates.returns and rng.random() < 0.5:
        crashes.append(Crash(0, float(rng.uniform(0, HORIZON_S)), float(rng.uniform(0, HORIZON_S / 4))))
    partitions = []
    for _ in range(rng.integers(3) if tolerates.partitions else 0):
        cut = frozenset(rng.permutation(NUM_DEVICES + first)[: rng.integers(1, NUM_DEVICES)].tolist())
        partitions.append(
            Partition(cut, float(rng.uniform(0, HORIZON_S)), float(rng.uniform(0, HORIZON_S / 2)))
        )
    detect_s = float(rng.uniform(0, HORIZON_S / 10))
    return FaultPlan(tuple(crashes), tuple(partitions), detect_s=detect_s, compute_jitter=0.3)


class Idle:
    """An executor that trains nothing: what is at stake here is who waits for whom."""

    num_workers, threads = 0, None
    group = 1000

    def run(self, works):
        return [_untrained(work) for work in works]

    def group_key(self, work):
        return None

    def describe(self):
        return {"executor": "idle"}


def _untrained(work):
    if isinstance(work, Gradient):
        return GradientResult(0 * work.parameters, 0.0)
    return Trained(work.parameters, 0.0, len(work.steps))


def sweep(method, seeds, *, rounds, time_s):
    """Run under the faults of each seed; how the runs ended, and how many crashes there were in all."""
    plan = small_plan(
        method, NUM_DEVICES, rounds=rounds, time_s=time_s, model={"name": "linear"},
        access=access(1e7, latency_s=1e-4, jitter=0.5), **CONFIG.get(method, {}),
    )  # fmt: skip
    ended, num_crashes = set(), 0
    for seed in seeds:
        watcher = Watcher()
        drawn = dataclasses.replace(plan, seed=seed, faults=drawn_faults(method, seed))
        outcome = VirtualRuntime(drawn, watcher, Idle()).run()
        assert (outcome.status, outcome.reason) in WAYS_TO_END, f"seed {seed}"
        for x in outcome.results.values():
            assert torch.isfinite(x.values).all(), f"seed {seed}"
        ended.add(outcome.status)
        num_crashes += sum(kind == "crash" for _, kind, *_ in watcher.events)
    return ended, num_crashes


@pytest.mark.parametrize("method", ROUNDS)
def test_a_run_to_the_last_round_finishes(method):
    ended, num_crashes = sweep(method, range(100), rounds=ROUNDS[method], time_s=None)
    assert ended == {"finished"} and num_crashes > 100


@pytest.mark.parametrize("method", ROUNDS)
def test_a_run_to_a_time_limit_stops_there(method):
    ended, num_crashes = sweep(method, range(15), rounds=None, time_s=1.2 * HORIZON_S)
    assert ended == {"stopped"} and num_crashes > 15


@pytest.mark.slow
@pytest.mark.parametrize("method", ROUNDS)
def test_a_hundred_runs_to_a_time_limit_stop_there(method):
    ended, _ = sweep(method, range(100, 200), rounds=None, time_s=1.2 * HORIZON_S)
    assert ended == {"stopped"}


@pytest.mark.parametrize("method", ["delay-by-one", "ring-allreduce"])
def test_a_fault_that_a_method_does_not_outlive_ends_the_run_and_says_why(method):
    """A device that crashes and returns at once, where the method does not say that it outlives returns."""
    reasons = set()
    for seed in range(30):
        crash = Crash(2, at_s=0.0002 * (seed + 1), down_s=0.001)
        plan = small_plan(
            method, 4, rounds=12, seed=seed, faults=FaultPlan(crashes=(crash,), detect_s=0.0001)
        )
        assert not plan.method.tolerates.returns
        try:
            reasons.add(VirtualRuntime(plan, Watcher(), Idle()).run().status)
        except RunError as error:
            assert "waits for" in str(error) or "node 2 is gone" in str(error)
            reasons.add(type(error).__name__)
    assert reasons <= {"finished", "Stuck", "ProgramFailed"} and len(reasons) > 0
