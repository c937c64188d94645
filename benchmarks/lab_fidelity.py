"""Virtual time beside a lab: eight nodes on unequal links that are shaped for real on this machine.

First patterns of messages of 1 and 10 MB (50 too, with --full), then whole runs of three methods whose
devices are slowed to their profiles, so that two cores can be all of them. Each case runs once in virtual
time and --repeats times in the lab (medians). Needs root and iproute2; without them it says so and measures
nothing.

    python benchmarks/lab_fidelity.py [--full] [--only flows|fedavg|d-psgd|ad-psgd] [--repeats N] [--json]
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from support.measure import parser

from edgefl.errors import ConfigError
from edgefl.experiment.config import Experiment, load_experiment
from edgefl.experiment.runner import RunResult, run_experiment
from edgefl.lab.hosts import lab_hosts
from edgefl.lab.system import require

FLEET = """
seed = 1
[fleet]
devices = { laptop = 2, laptop-old = 2, jetson-nano = 2, raspberry-pi-4b = 2 }
roles = { server = "laptop" }
[fleet.stragglers]
share = 1.0
slowdown = SLOWDOWN
[network.link]
server = { up = "8 MB/s", down = "8 MB/s", latency = "2 ms" }
laptop = { up = "6 MB/s", down = "10 MB/s", latency = "4 ms" }
laptop-old = { up = "2.5 MB/s", down = "6 MB/s", latency = "10 ms" }
jetson-nano = { up = "2 MB/s", down = "4 MB/s", latency = "8 ms" }
raspberry-pi-4b = { up = "1 MB/s", down = "5 MB/s", latency = "15 ms" }
[execution]
emulate = true
"""
FLOWS = """
[method]
name = "support/flows.py"
[method.flows]
sizes = [NUM_BYTES]
repeats = REPEATS
[data]
name = "synthetic"
num_owners = 8
examples_per_owner = 10
[model]
name = "linear"
[stop]
rounds = 1
"""
TRAINING = """
[method]
name = "METHOD"
[data]
name = "digits"
[model]
name = "mlp"
hidden = [500, 400]
[train]
local_steps = 5
[evaluate]
every_s = 1000.0
[stop]
rounds = ROUNDS
"""
METHODS = {"fedavg": 10, "d-psgd": 10, "ad-psgd": 30}
"""Rounds of each."""
SIZES = ((1_000_000, 5), (10_000_000, 2), (50_000_000, 1))
"""Bytes of a message, and how often each pattern is repeated within a run."""
MOST_ERROR = {"flows": 0.10, "runs": 0.15}
HERE = Path(__file__).resolve().parent


def experiment(folder: Path, text: str, **values: object) -> Experiment:
    """The experiment of this text, with these words replaced."""
    whole = FLEET + text
    for word, value in {"SLOWDOWN": 1.0, **values}.items():
        whole = whole.replace(word, str(value))
    file = folder / "experiment.toml"
    file.write_text(whole.replace("support/", f"{HERE}/support/"), encoding="utf-8")
    return load_experiment(file)


def both(folder: Path, text: str, repeats: int, **values: object) -> tuple[RunResult, list[RunResult]]:
    """A run in virtual time, and its repeats in the lab."""
    what = experiment(folder, text, **values)
    virtual = run_experiment(what, out=folder / "virtual")
    labs = [
        run_experiment(what, runtime="local", housing=lab_hosts, out=folder / f"lab-{k}", predict=False)
        for k in range(repeats)
    ]
    return virtual, labs


def times(run: RunResult) -> dict[str, list[float]]:
    """What the conductor noted, by pattern and size."""
    found = defaultdict(list)
    with (run.folder / "metrics.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if " MB" in row["name"]:
                found[row["name"]].append(float(row["value"]))
    return dict(found)


def flow_rows(folder: Path, full: bool, repeats: int) -> list[tuple[str, float, float]]:
    """(case, measured, predicted) seconds, a row per pattern and size; medians of ratios' sides."""
    rows = []
    for size, turns in SIZES if full else SIZES[:2]:
        place = folder / str(size)
        place.mkdir()
        virtual, labs = both(place, FLOWS, repeats, NUM_BYTES=size, REPEATS=turns)
        measured = [times(run) for run in labs]
        for case, predicted in times(virtual).items():
            seen = [statistics.median(run[case]) for run in measured]
            rows.append((case, statistics.median(seen), statistics.median(predicted)))
    return rows


def run_row(folder: Path, method: str, repeats: int) -> tuple[str, float, float]:
    """(case, measured, predicted) seconds of a whole run."""
    place = folder / method
    place.mkdir()
    virtual, labs = both(place, TRAINING, repeats, METHOD=method, ROUNDS=METHODS[method], SLOWDOWN=8.0)
    measured = statistics.median(run.summary["time_s"] for run in labs)
    return f"{method}, {METHODS[method]} rounds", measured, virtual.summary["time_s"]


def say(kind: str, rows: list[tuple[str, float, float]], as_json: bool) -> None:
    """A row per case, and what they come to."""
    errors = [predicted / measured - 1 for _, measured, predicted in rows]
    for (case, measured, predicted), error in zip(rows, errors, strict=True):
        if as_json:
            print(
                json.dumps({"case": case, "measured_s": measured, "predicted_s": predicted, "error": error})
            )
        else:
            print(f"{case:24} {measured:9.3f} s {predicted:9.3f} s {error:+7.1%}", flush=True)
    middle, worst = statistics.median(map(abs, errors)), max(map(abs, errors))
    wanted = f"wanted: {'median' if kind == 'flows' else 'worst'} at most {MOST_ERROR[kind]:.0%}"
    if not as_json:
        print(f"{kind}: median error {middle:.1%}, worst {worst:.1%} ({wanted})")


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--full", action="store_true", help="messages of 50 MB too")
    options.set_defaults(repeats=1)
    chosen = options.parse_args()
    try:
        require()
    except ConfigError as error:
        print(f"nothing measured: {error}")
        sys.exit(0)
    if not chosen.json:
        print(f"{'case':24} {'measured':>11} {'predicted':>11} {'error':>7}")
    with tempfile.TemporaryDirectory() as name:
        if "flows".startswith(chosen.only):
            say("flows", flow_rows(Path(name), chosen.full, chosen.repeats), chosen.json)
        methods = [method for method in METHODS if method.startswith(chosen.only)]
        if methods:
            say("runs", [run_row(Path(name), method, chosen.repeats) for method in methods], chosen.json)


if __name__ == "__main__":
    main()
