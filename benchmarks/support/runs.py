"""Real edgefl runs in virtual time, recording included, without a folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.experiment.build import Built, build
from edgefl.experiment.config import parse_experiment
from edgefl.experiment.observer import RunObserver
from edgefl.runtimes.virtual import VirtualRuntime


def built(tables: dict[str, Any]) -> Built:
    """A run put together from the tables of an experiment file."""
    return build(parse_experiment(tables))


def run_seconds(run: Built) -> float:
    """Wall seconds of a run, from its first event to its last, spans and metrics recorded."""
    observer = RunObserver(run)
    runtime = VirtualRuntime(run.plan, observer, run.executor)
    start = time.perf_counter()
    runtime.run()
    return time.perf_counter() - start


def fedavg_tables(
    clients: int, *, cohort: int, rounds: int, model: dict[str, Any], data: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """A FedAvg experiment on Raspberry Pis: 5 steps of 16, one evaluation at the end."""
    return {
        "method": {"name": "fedavg", "fedavg": {"client_fraction": cohort / clients}},
        "fleet": {"devices": {"raspberry-pi-4b": clients}},
        "model": model,
        "data": data,
        "train": {"learning_rate": 0.1, "batch_size": 16, "local_steps": 5},
        "evaluate": {"every_rounds": rounds},
        "stop": {"rounds": rounds},
        **more,
    }


def noise_images(folder: Path, num_train: int = 6000, num_test: int = 200) -> dict[str, Any]:
    """A [data] table for images of noise, 28 x 28 with ten labels: what a step costs does not depend on
    what it learns. Written into `folder`."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", num_train), ("test", num_test)):
        arrays[f"x_{part}"] = rng.standard_normal((count, 1, 28, 28), np.float32)
        arrays[f"y_{part}"] = np.arange(count) % 10
    np.savez(folder / "noise.npz", **arrays)
    return {"name": "folder", "folder": str(folder / "noise.npz")}
