"""Measure this machine for an experiment and print a device profile.

    python examples/measure_device.py EXPERIMENT.toml > my-board.toml

The step time of the experiment's own model and batch size is measured; beside it the rates of a matrix
product and of a copy, for work of other kinds. One torch thread, as in a run. Power is not measured.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from edgefl.experiment.build import build
from edgefl.experiment.config import load_experiment
from edgefl.learning.work import LocalSGD
from edgefl.learning.workload import Workload

PROFILE = """\
title = "{title}"
compute_flops = {flops:.3g}
memory_bytes_per_s = {rate:.3g}
memory_bytes = {memory}
step_times_s = {{ "{model}" = {{ {batch_size} = {step_s:.3g} }} }}
source = "measured by examples/measure_device.py"
"""
SIDE, COPIED_BYTES, NUM_STEPS = 384, 1 << 26, 50


def fastest_s(work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of some repetitions; one more before them warms up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def profile(experiment: Path) -> str:
    """The profile as TOML."""
    torch.set_num_threads(1)
    built = build(load_experiment(experiment))
    learner, batch_size = built.learner, built.experiment.train.batch_size
    work = LocalSGD(learner.model.init(), built.parts[0], 0, Workload(batch_size=batch_size, steps=NUM_STEPS))
    square, block = torch.rand(SIDE, SIDE), torch.ones(COPIED_BYTES, dtype=torch.uint8)
    return PROFILE.format(
        title=platform.node() or platform.machine(),
        flops=2 * SIDE**3 / fastest_s(lambda: square @ square),
        rate=2 * COPIED_BYTES / fastest_s(block.clone),
        memory=int(0.8 * psutil.virtual_memory().available),
        model=learner.model.label,
        batch_size=batch_size,
        step_s=fastest_s(lambda: work.run(learner)) / NUM_STEPS,
    )


if __name__ == "__main__":
    print(profile(Path(sys.argv[1])), end="")
