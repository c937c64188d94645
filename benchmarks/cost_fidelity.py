"""Predicted against measured step times on this machine, from its generic profile alone.

The profile measures operators and a few small reference networks; none of the models below is among them.
Steps are timed on one thread, by the time that the thread has had the processor; the lower quartile of the
repeats counts, as a shared machine only ever adds. Prints a row per model, part and batch size, and errors.

    python benchmarks/cost_fidelity.py [--quick]
"""

from __future__ import annotations

import statistics
import sys

import torch

from edgefl.allocator import keep_memory
from edgefl.devices import DeviceProfile
from edgefl.experiment.profiling import measure_kernels
from edgefl.learning import Learner, Model, ModelConfig, Problem, TrainConfig, Workload, build_model
from edgefl.learning.cost import duration_s
from edgefl.learning.measuring import made_data, stage_sample, step_sample
from edgefl.learning.work import LocalSGD
from edgefl.learning.work_costs import stage_backward_cost
from edgefl.planning.workloads import narrowed

DIGITS, FASHION = Problem("classification", (1, 8, 8), 10), Problem("classification", (1, 28, 28), 10)
COLOUR, TEXT = Problem("classification", (3, 32, 32), 10), Problem("language", (20,), 60)
MODELS = (
    ("linear", {}, DIGITS), ("mlp", {"hidden": [64]}, DIGITS), ("mlp", {"hidden": [200, 100]}, FASHION),
    ("cnn", {}, DIGITS), ("cnn", {}, FASHION), ("resnet", {}, DIGITS),
    ("resnet", {"channels": [16, 32, 64]}, COLOUR), ("vgg", {}, COLOUR), ("char-lstm", {}, TEXT),
    ("transformer", {}, TEXT),
)  # fmt: skip
BATCHES = (4, 16, 64, 128)
NARROW = ("mlp", "cnn", "vgg")


def rows(model: Model, problem: Problem, profile: DeviceProfile, batch: int, budget_s: float):
    """(part, measured, predicted) of a whole step, of the two halves of a model that can be cut, and of a
    step of the sub-model with half of the units where there is one."""
    whole = [("full", model)]
    if model.name in NARROW:
        whole.append(("half", narrowed(model, 0.5)))
    for part, one in whole:
        learner = Learner(one, TrainConfig(batch_size=batch))
        work = LocalSGD(one.init(), made_data(problem), 0, Workload(batch_size=batch, steps=2))
        yield part, step_sample(one, batch, budget_s).quiet_s, duration_s(work.cost(learner), profile) / 2
    last = len(model.blocks)
    for first, end in ((0, last // 2), (last // 2, last)) if last > 1 else ():
        stage = model.stage(first, end)
        cost = stage_backward_cost(stage, batch, first > 0, kept=False)
        yield f"{first}:{end}", stage_sample(stage, batch, budget_s).quiet_s, duration_s(cost, profile)


def main() -> None:
    torch.set_num_threads(1)
    keep_memory()
    quick = "--quick" in sys.argv
    kernels = measure_kernels(quick=quick).kernels
    profile = DeviceProfile(
        name="here", compute_flops=1e9, memory_bytes_per_s=1e9, memory_bytes=10**9, kernels=kernels
    )
    errors = []
    print(f"{'model':22} {'part':>5} {'batch':>5} {'measured':>12} {'predicted':>12} {'error':>7}")
    for name, options, problem in MODELS:
        model = build_model(ModelConfig(name=name, **options), problem, 0)
        for batch in BATCHES:
            for part, measured, predicted in rows(model, problem, profile, batch, 0.1 if quick else 0.3):
                error = predicted / measured - 1
                errors.append(abs(error))
                times = f"{measured * 1e6:9.0f} us {predicted * 1e6:9.0f} us"
                print(f"{model.label:22} {part:>5} {batch:5} {times} {error:+7.1%}", flush=True)
    middle, worst = statistics.median(errors), max(errors)
    print(f"{len(errors)} steps: median error {middle:.1%}, worst {worst:.1%}")


if __name__ == "__main__":
    main()
