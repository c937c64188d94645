"""Training throughput of real runs in virtual time beside a bare sequential PyTorch loop.

W1: 100 clients, MLP 64-64-10 on digits, 5 SGD steps of 16. W2: 100 clients, CNN of 20,000 parameters on
28 x 28. W3: 1,000 clients as W1, 100 of them in each round. D-PSGD: 64 nodes on a ring. AD-PSGD: 64 nodes
whose speeds spread fivefold, against the same run with one work item after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from support import plain
from support.measure import Line, arguments, interleaved, one_thread, show
from support.runs import built, fedavg_tables, noise_images, run_seconds

from edgefl.allocator import keep_memory
from edgefl.experiment.build import Built

RATE, BATCH, STEPS = 0.1, 16, 5


def federated(name: str, clients: int, rounds: int, least: float, aim: float) -> tuple[Any, ...]:
    """W1 and W3 on digits."""
    data = {"name": "digits", "partition": {"name": "iid", "allow_reuse": True}}
    tables = fedavg_tables(
        clients, cohort=100, rounds=rounds, model={"name": "mlp", "hidden": [64]}, data=data
    )
    run = built(tables)
    return name, run, *_against_loop(run, rounds, 4), "client updates/s", least, aim


def convolutional(name: str, least: float, aim: float) -> tuple[Any, ...]:
    """W2 on images of noise."""
    model = {"name": "cnn", "channels": [8, 16], "hidden": 20}
    rounds = 2
    with TemporaryDirectory() as folder:
        data = noise_images(Path(folder))
        run = built(fedavg_tables(100, cohort=100, rounds=rounds, model=model, data=data))
    return name, run, *_against_loop(run, rounds, 1), "client updates/s", least, aim


def _against_loop(run: Built, rounds: int, plain_rounds: int) -> tuple[Callable[[], float], ...]:
    """The run's client updates per second, and the bare loop's over fewer rounds."""
    model = run.learner.model.build()

    def ours() -> float:
        return rounds * 100 / run_seconds(run)

    def loop() -> float:
        return plain.fedavg(model, run.parts, 100, plain_rounds, STEPS, BATCH, RATE)

    return ours, loop


def d_psgd(steps: int = STEPS, nodes: int = 64, rounds: int = 20) -> tuple[Any, ...]:
    """D-PSGD on a ring of digits; steps: mini-batches of a node in a round."""
    tables = _peers("d-psgd", nodes, rounds)
    tables["train"]["local_steps"] = steps
    run = built(tables)
    model = run.learner.model.build()
    near = [run.plan.network.topology.neighbors(i) for i in range(nodes)]

    def ours() -> float:
        return rounds * nodes / run_seconds(run)

    def loop() -> float:
        return plain.d_psgd(model, run.parts, near, 4, steps, BATCH, RATE)

    return f"D-PSGD, {nodes} nodes, {steps} local steps", run, ours, loop, "node rounds/s", 8.0, 15.0


def ad_psgd(nodes: int = 64, steps: int = 40) -> tuple[Any, ...]:
    """AD-PSGD with speeds spread fivefold, batched against one by one."""
    tables = _peers("ad-psgd", nodes, steps)
    tables["fleet"]["stragglers"] = {str(i): 1 + 4 * i / (nodes - 1) for i in range(nodes)}
    one_by_one = built(tables | {"execution": {"executor": "inline"}})
    run = built(tables)

    def ours() -> float:
        return steps * nodes / run_seconds(run)

    def inline() -> float:
        return steps * nodes / run_seconds(one_by_one)

    return f"AD-PSGD, {nodes} nodes, speeds spread 5x", run, ours, inline, "gradients/s", 4.0, 8.0


def _peers(method: str, nodes: int, rounds: int) -> dict[str, Any]:
    return {
        "method": {"name": method},
        "fleet": {"devices": {"raspberry-pi-4b": nodes}},
        "model": {"name": "mlp", "hidden": [64]},
        "data": {"name": "digits"},
        "train": {"learning_rate": RATE, "batch_size": BATCH, "local_steps": 1},
        "evaluate": {"every_rounds": rounds},
        "stop": {"rounds": rounds},
    }


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "W1": lambda: federated("W1: 100 clients, MLP", 100, 40, 10.0, 20.0),
    "W2": lambda: convolutional("W2: 100 clients, CNN", 2.3, 2.8),
    "W3": lambda: federated("W3: 100 of 1,000 clients, MLP", 1000, 40, 10.0, 20.0),
    "D-PSGD": d_psgd,
    "D-PSGD, one step": lambda: d_psgd(1),
    "AD-PSGD": ad_psgd,
}


def main() -> None:
    options = arguments(__doc__ or "")
    keep_memory()
    lines = []
    with one_thread():
        torch.manual_seed(0)
        for key, make in CASES.items():
            if options.only.lower() not in key.lower():
                continue
            name, run, ours, other, unit, least, aim = make()
            found = interleaved({"ours": ours, "other": other}, options.repeats)
            against = "one by one" if key == "AD-PSGD" else "bare loop"
            how = run.executor.describe()
            label = f"{name} ({', '.join(f'{k} {v}' for k, v in how.items())})"
            lines.append(
                Line(label, found["ours"], unit, against, found["ours"] / found["other"], least, aim)
            )
    show(lines, options.json)


if __name__ == "__main__":
    main()
