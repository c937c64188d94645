"""Work that is begun before its time: the clock goes on, and nothing that a program sees changes."""

import threading

import pytest
from small import small_plan
from toy import Watcher

from edgefl.learning.executors import Batched, Inline, Parallel
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.parameters import moves
from edgefl.runtimes.virtual import VirtualRuntime
from edgefl.runtimes.virtual.checkpoint import take_checkpoint

CNN = {"name": "cnn", "channels": (2, 2), "hidden": 4}


def run_with(executor, faults: FaultPlan):
    plan = small_plan("fedavg", 4, rounds=2, model=CNN, faults=faults)
    watcher = Watcher()
    runtime = VirtualRuntime(plan, watcher, executor(plan.learner))
    outcome = runtime.run()
    models = [(node, t, step, v.values.numpy().tobytes()) for node, t, step, v in watcher.models]
    return models, watcher.spans, outcome.time_s, runtime


@pytest.mark.parametrize("faults", [FaultPlan(), FaultPlan((Crash(2, 0.02, 0.5),), detect_s=0.1)])
def test_the_same_models_at_the_same_times(faults):
    *expected, inline = run_with(Inline, faults)
    *found, parallel = run_with(lambda learner: Parallel(learner, 2), faults)
    assert found == expected
    assert parallel._workshop.items == parallel._workshop.batches >= 8
    assert not parallel._workshop._begun and not inline._workshop._begun


def test_work_begins_while_the_clock_goes_on():
    """All four clients are under way before the first result is due."""
    plan = small_plan("fedavg", 4, rounds=1, model=CNN)
    meet = threading.Barrier(4, timeout=30)

    class Meeting(Parallel):
        def start(self, works):
            for _ in works:
                self.threads.submit(lambda _: meet.wait())
            return super().start(works)

    VirtualRuntime(plan, Watcher(), Meeting(plan.learner, 4)).run()
    assert not meet.broken


def test_a_checkpoint_waits_for_what_has_been_begun():
    plan = small_plan("fedavg", 4, rounds=2, model=CNN)
    seen = []

    class Keeper:
        def due(self):
            return bool(runtime._workshop._begun) and not seen

        def write(self, runtime):
            seen.append(len(runtime._workshop._begun))
            take_checkpoint(runtime, {})
            assert not runtime._workshop._begun

    runtime = VirtualRuntime(plan, Watcher(), Parallel(plan.learner, 2), Keeper())
    runtime.run()
    assert seen and seen[0] > 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_group_begins_when_it_is_full(workers):
    """Not when its first result is due: all of it is done by then, and the same for any number of threads."""
    plan = small_plan("fedavg", 6, rounds=2)
    waiting = []

    class Noting(Batched):
        def start(self, works):
            waiting.append((len(works), runtime.clock()))
            return super().start(works)

        def run(self, works):
            waiting.append((len(works), runtime.clock()))
            return super().run(works)

    watcher = Watcher()
    runtime = VirtualRuntime(plan, watcher, Noting(plan.learner, 2, workers))
    runtime.run()
    ends = [end for _, name, _, end, _ in watcher.spans if name == "compute"]
    assert [count for count, _ in waiting] == [2] * 6
    assert waiting[0][1] < min(ends)


def test_a_crash_takes_its_item_out_of_a_begun_group():
    """The others get their results, whoever is gone, and the same ones with any number of threads."""
    faults = FaultPlan((Crash(2, 0.02, 0.5),), detect_s=0.1)
    runs = []
    for workers in (1, 2):
        plan, watcher = small_plan("fedavg", 4, rounds=3, faults=faults), Watcher()
        VirtualRuntime(plan, watcher, Batched(plan.learner, 2, workers)).run()
        runs.append([(node, t, step, v.values.numpy().tobytes()) for node, t, step, v in watcher.models])
    assert runs[0] == runs[1] and len(runs[0]) >= 3


class Noting(Batched):
    """Notes how many items each call began beside the clock, and carried out at once."""

    def __init__(self, learner, group, workers):
        super().__init__(learner, group, workers)
        self.began, self.at_once = [], []

    def start(self, works):
        self.began.append(len(works))
        return super().start(works)

    def run(self, works):
        self.at_once.append(len(works))
        return super().run(works)


def noted_run(plan, group, workers):
    watcher = Watcher()
    runtime = VirtualRuntime(plan, watcher, Noting(plan.learner, group, workers))
    runtime.run()
    models = [(node, t, step, v.values.numpy().tobytes()) for node, t, step, v in watcher.models]
    return models, runtime.executor, runtime._workshop


def test_what_is_left_over_is_begun_with_the_groups():
    """Of six clients in groups of four two are left over: nothing is left for the clock's own thread."""
    models, executor, workshop = noted_run(small_plan("fedavg", 6, rounds=2), 4, 2)
    expected, alone, _ = noted_run(small_plan("fedavg", 6, rounds=2), 4, 1)
    assert models == expected
    assert (executor.began, executor.at_once) == ([4, 2, 4, 2], [])
    assert (alone.began, alone.at_once) == ([], [4, 2, 4, 2])
    assert not workshop._ahead and not workshop._in_vain


def test_others_come_after_that():
    """A client of FedAsync begins again when it has reported, and joins those that were begun ahead."""
    faults = FaultPlan(compute_jitter=0.5)
    found = [noted_run(small_plan("fedasync", 6, rounds=6, faults=faults), 4, workers) for workers in (1, 2)]
    (expected, _, alone), (models, _, workshop) = found
    assert models == expected and len(models) > 3
    assert (workshop.batches, workshop.items) == (alone.batches, alone.items)
    assert workshop._in_vain and not workshop._ahead


def test_one_of_them_leaves_after_that():
    """Clients 5 and 6 take three times as long, and 6 dies between the others' ends and its own."""

    def slow_plan(faults):
        return small_plan("fedavg", 6, rounds=3, slowdowns=[1, 1, 1, 1, 1, 3, 3], faults=faults)

    watcher = Watcher()
    plan = slow_plan(FaultPlan())
    VirtualRuntime(plan, watcher, Batched(plan.learner, 4)).run()
    first, *_, last = sorted(end for _, name, _, end, _ in watcher.spans if name == "compute")[:6]
    faults = FaultPlan((Crash(6, (first + last) / 2),), detect_s=0.01)
    found = [noted_run(slow_plan(faults), 4, workers) for workers in (1, 2)]
    (expected, _, alone), (models, _, workshop) = found
    assert models == expected and len(models) >= 3
    assert (workshop.batches, workshop.items) == (alone.batches, alone.items)
    assert workshop._in_vain and not workshop._ahead


def test_reports_are_added_on_the_threads_of_the_run(monkeypatch):
    """Each of two rounds adds five reports to a first, in two pieces: one of them is handed over."""
    monkeypatch.setattr(moves, "_LEAST", 100)
    handed = []

    class Handing(Batched):
        def __init__(self, learner, workers):
            super().__init__(learner, 6, workers)
            submit = self.threads.submit
            self.threads.submit = lambda call: handed.append(call) or submit(call)

    runs = []
    for workers in (1, 2):
        plan, watcher = small_plan("fedavg", 6, rounds=2), Watcher()
        VirtualRuntime(plan, watcher, Handing(plan.learner, workers)).run()
        runs.append([v.values.numpy().tobytes() for _, _, _, v in watcher.models])
    added = [call for call in handed if getattr(call, "func", None) is moves._move]
    assert runs[0] == runs[1] and len(runs[0]) >= 2
    assert len(added) == 2
