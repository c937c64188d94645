"""What the testbed takes beside the training: its own time, its sums, its start.

Own time: FedAvg with 1 M parameters on 100 nodes, every node in every round, one local step of 16: the wall
time of a run less that of the same training and evaluation alone, in the same groups on the same threads.
Sums: the streaming weighted mean of 100 models of 10 MB beside as many copies. Start: `edgefl --help`, and
`edgefl run` until work is carried out.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from support.measure import Line, arguments, interleaved, one_thread, seconds, show
from support.runs import built, fedavg_tables, run_seconds

from edgefl.allocator import keep_memory
from edgefl.data import Batch
from edgefl.experiment.toml import write_toml
from edgefl.learning import Evaluate, LocalSGD
from edgefl.parameters import Layout, Vector, WeightedMean

MODELS, MB = 100, 10
FIRST_WORK = """
import os, sys, time, psutil
from edgefl.learning.executors import Group
def begun(self, works, executor, workers):
    print(time.time() - psutil.Process().create_time(), flush=True)
    os._exit(0)
Group.__init__ = begun
sys.argv = ["edgefl", "run", {file!r}, "--out", {out!r}, "--quiet"]
from edgefl.cli import main
main()
"""


def own_time(repeats: int) -> Line:
    """The testbed's share of a run's wall time; run and training alone take turns."""
    rounds = 3
    tables = fedavg_tables(
        100, cohort=100, rounds=rounds, model={"name": "mlp", "hidden": [1000, 900]}, data={"name": "digits"}
    )
    tables["train"]["local_steps"] = 1
    run = built(tables)
    w, data = run.learner.model.init(), run.parts[0].dataset

    def training() -> float:
        return seconds(lambda: [train(t) for t in range(rounds)] + [evaluate()])

    def train(t: int) -> None:
        workloads = [run.plan.nodes[i].workload for i in run.plan.ids("client")]
        works = [LocalSGD(w, part, t, load) for part, load in zip(run.parts, workloads, strict=True)]
        size = run.executor.group
        groups = [run.executor.start(works[i : i + size]) for i in range(0, len(works), size)]
        for promise in itertools.chain(*groups):
            promise.result()

    def evaluate() -> None:
        run.executor.run([Evaluate(w, Batch(data.x_test, data.y_test))])

    found = interleaved({"run": lambda: run_seconds(run), "training": training}, repeats)
    percent = 100 * (1 - found["training"] / found["run"])
    name = f"own time, {run.learner.model.layout.size:,} parameters, {found['run']:.2f} s"
    return Line(name, percent, "% of wall", least=10, aim=3, smaller_is_better=True)


def sums(repeats: int) -> Line:
    """The streaming mean of many models, against copying each of them once."""
    size = MB * 1_000_000 // 4
    model = torch.nn.Linear(size - 1, 1, bias=True)
    layout = Layout.of_module(model)
    vectors = [Vector(layout, torch.rand(size)) for _ in range(8)]
    target = torch.empty(size)

    def mean() -> float:
        sink = WeightedMean(layout)
        return seconds(lambda: [sink.add(vectors[i % 8], 1.0 + i) for i in range(MODELS)])

    def copy() -> float:
        return seconds(lambda: [target.copy_(vectors[i % 8].values) for i in range(MODELS)])

    found = interleaved({"mean": mean, "copy": copy}, repeats)
    speed = MODELS * MB / 1e3 / found["mean"]
    ratio = found["mean"] / found["copy"]
    name = f"weighted mean of {MODELS} models of {MB} MB"
    return Line(name, speed, "GB/s", "time of memcpy", ratio, 1.3, 1.0, smaller_is_better=True)


def starts(repeats: int) -> list[Line]:
    """Seconds to the help text, and to the first work of a run of one round."""
    tables = fedavg_tables(4, cohort=4, rounds=1, model={"name": "mlp"}, data={"name": "digits"})
    with TemporaryDirectory() as folder:
        file = Path(folder) / "one.toml"
        file.write_text(write_toml(tables), encoding="utf-8")
        turn = iter(range(1000))

        def first_work() -> float:
            code = FIRST_WORK.format(file=str(file), out=f"{folder}/out{next(turn)}")
            said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            return float(said.stdout.split()[-1])

        def call(*command: str) -> float:
            return seconds(lambda: subprocess.run(command, capture_output=True, check=True))

        found = interleaved(
            {
                "help": lambda: call(sys.executable, "-m", "edgefl.cli", "--help"),
                "work": first_work,
                "python": lambda: call(sys.executable, "-c", "import typer"),
                "torch": lambda: call(sys.executable, "-c", "import torch"),
            },
            repeats,
        )
    return [
        Line("edgefl --help", found["help"], "s", least=0.3, aim=0.2, smaller_is_better=True),
        Line("  beside importing typer", found["help"], "s", "its time", found["help"] / found["python"]),
        Line("edgefl run to its first work", found["work"], "s", least=3, aim=2, smaller_is_better=True),
        Line("  beside importing torch", found["work"], "s", "its time", found["work"] / found["torch"]),
    ]


def main() -> None:
    options = arguments(__doc__ or "")
    keep_memory()
    lines: list[Line] = []
    with one_thread():
        if options.only in "own time":
            lines.append(own_time(options.repeats))
        if options.only in "sums":
            lines.append(sums(options.repeats))
    if options.only in "start":
        lines += starts(options.repeats)
    show(lines, options.json)


if __name__ == "__main__":
    main()
