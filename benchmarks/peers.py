"""edgefl beside Flower, on the same machine and in turns.

W1, 100 clients, MLP 64-64-10 on digits, 5 SGD steps of 16: a FedAvg run in virtual time against Flower's
simulation (Ray, one client per core at a time), start-up not counted. Then arrays of 1 MB and 100 MB from a
server to a client and back: two processes of edgefl against Flower's superlink and supernode.

Flower lives in an environment of its own, benchmarks/.peers; `make bench-peers` makes it and runs this.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from support import plain
from support.echoes import SIZES
from support.measure import Line, arguments, one_thread, show
from support.runs import built, fedavg_tables, run_seconds

from edgefl.allocator import keep_memory
from edgefl.experiment import local
from edgefl.experiment.build import Built, build
from edgefl.experiment.config import load_experiment
from edgefl.experiment.observer import RunObserver
from edgefl.runtimes.grpc.local import free_addresses

HERE = Path(__file__).parent
PEERS = HERE / ".peers" / "bin"
CLIENTS, ROUNDS, FLOWER_ROUNDS, STEPS, BATCH, RATE = 100, 40, 2, 5, 16, 0.1
ECHO = """
[method]
name = "{method}"
[fleet]
devices = {{ raspberry-pi-4b = 1 }}
[model]
name = "linear"
[data]
name = "digits"
[stop]
rounds = {rounds}
"""


@contextmanager
def flower(folder: Path) -> Iterator[Callable[..., list[str]]]:
    """A way to start Flower's programs: quiet, offline, at home in `folder`. What was started ends here."""
    settings = {
        "FLWR_HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{PEERS}{os.pathsep}{os.environ['PATH']}",
    }
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | settings
    with ExitStack() as stack:

        def start(program: str, *options: str, wait: bool = False) -> None:
            log = stack.enter_context((folder / f"{Path(program).name}.log").open("ab"))
            process = subprocess.Popen(
                [str(PEERS / program), *options], env=environment, stdout=log, stderr=log, cwd=folder
            )
            stack.callback(_end, process)
            if wait and process.wait() != 0:
                raise SystemExit(f"{program} failed: {Path(log.name).read_text()[-2000:]}")

        yield start


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


def w1_of_flower(run: Built) -> float:
    """Client updates per second of Flower's simulation, on the same data."""
    with tempfile.TemporaryDirectory() as name, flower(Path(name)) as start:
        arrays = {}
        for i, part in enumerate(run.parts):
            batch = part.batch(0, len(part))
            arrays[f"x_{i}"], arrays[f"y_{i}"] = batch.x.flatten(1).numpy(), batch.y.numpy()
        np.savez(Path(name, "parts.npz"), **arrays)
        out = Path(name, "out.json")
        script = str(HERE / "flower" / "simulation.py")
        numbers = map(str, (1, FLOWER_ROUNDS, STEPS, BATCH, RATE))
        start("python", script, str(Path(name, "parts.npz")), *numbers, str(out), wait=True)
        return statistics.median(json.loads(out.read_text(encoding="utf-8")))


def w1(turns: int) -> list[Line]:
    """The run, Flower's simulation and a bare loop, in turns."""
    data = {"name": "digits", "partition": {"name": "iid", "allow_reuse": True}}
    model = {"name": "mlp", "hidden": [64]}
    run = built(fedavg_tables(CLIENTS, cohort=CLIENTS, rounds=ROUNDS, model=model, data=data))
    bare = run.learner.model.build()
    found: dict[str, list[float]] = {"edgefl": [], "flower": [], "bare": []}
    with one_thread():
        run_seconds(run)
        for _ in range(turns):
            found["edgefl"].append(ROUNDS * CLIENTS / run_seconds(run))
            found["bare"].append(plain.fedavg(bare, run.parts, CLIENTS, 4, STEPS, BATCH, RATE))
            found["flower"].append(w1_of_flower(run))
    ours, other, loop = (statistics.median(found[name]) for name in ("edgefl", "flower", "bare"))
    unit = "client updates/s"
    return [
        Line("W1: 100 clients, MLP", ours, unit, "Flower's simulation", ours / other, 60, 120),
        Line("  a bare loop", loop, unit, "Flower's simulation", loop / other),
        Line("  Flower's simulation", other, unit),
    ]


def echo_of_edgefl(turns: int) -> dict[str, list[float]]:
    """Seconds of each echo between two processes."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "experiment.toml")
        method = HERE / "support" / "echoes.py"
        file.write_text(ECHO.format(method=method, rounds=turns + 1), encoding="utf-8")
        run = build(load_experiment(file))
        outcome = local.run_processes(Path(name), run, RunObserver(run, hosted=(0,)))
    times: dict[str, list[float]] = outcome.results[0]
    return {size: found[1:] for size, found in times.items()}


def echo_of_flower(turns: int) -> dict[str, list[float]]:
    """Seconds of each echo through a superlink and a supernode."""
    with tempfile.TemporaryDirectory() as name, flower(Path(name)) as start:
        link, node = free_addresses(2)
        config = f'[superlink.here]\naddress = "{link}"\ninsecure = true\n'
        Path(name, "config.toml").write_text(config, encoding="utf-8")
        start("flower-superlink", "--insecure", *_at(link))
        time.sleep(5)
        start("flower-supernode", "--insecure", "--superlink", link, *_at(node))
        time.sleep(5)
        out = Path(name, "out.json")
        settings = f'out="{out}" turns={turns}'
        app = str(HERE / "flower")
        start("flwr", "run", app, "here", "--stream", "--run-config", settings, wait=True)
        if not out.exists():
            logs = "\n".join(log.read_text(encoding="utf-8") for log in sorted(Path(name).glob("*.log")))
            raise SystemExit(f"Flower's echo came to nothing: {logs[-4000:]}")
        times: dict[str, list[float]] = json.loads(out.read_text(encoding="utf-8"))
        return times


def _at(address: str) -> tuple[str, ...]:
    host, _, port = address.rpartition(":")
    return "--host", host, "--port", port


def echoes(turns: int) -> list[Line]:
    """Arrays there and back, with both, in turns."""
    ours: dict[str, list[float]] = {size: [] for size in SIZES}
    other: dict[str, list[float]] = {size: [] for size in SIZES}
    for _ in range(turns):
        for found, times in ((ours, echo_of_edgefl(3)), (other, echo_of_flower(1))):
            for size in SIZES:
                found[size] += times[size]
    lines = []
    for size in SIZES:
        mine, its = statistics.median(ours[size]), statistics.median(other[size])
        lines.append(Line(f"{size} there and back", mine, "s", "as fast as Flower", its / mine, 10, 30))
        lines.append(Line("  Flower's superlink and supernode", its, "s"))
    return lines


def main() -> None:
    options = arguments(__doc__ or "")
    if not (PEERS / "flower-superlink").exists():
        print("Flower is not there: `make bench-peers` gets it into benchmarks/.peers", file=sys.stderr)
        raise SystemExit(2)
    keep_memory()
    torch.manual_seed(0)
    cases = {"w1": w1, "echo": echoes}
    chosen = [case for name, case in cases.items() if options.only.lower() in name]
    show([line for case in chosen for line in case(options.repeats)], options.json)


if __name__ == "__main__":
    main()
