"""A run folder as a runner would write it, made up from a few rules: FedAvg on unequal devices."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from edgefl.keyed import generator

COLUMNS = {
    "metrics": "time_s,node,name,value",
    "curve": "time_s,step,value,loss,worst_tenth,best,payload_bytes,joules",
    "evaluations": "time_s,node,step,metric,loss",
    "nodes": "node,role,device,num_examples,busy_s,idle_s,sent_bytes,received_bytes,joules,metric,loss",
    "traffic": "sender,receiver,kind,messages,payload_bytes,encoded_bytes",
    "spans": "node,kind,start_s,end_s,detail",
    "events": "time_s,kind,node,detail",
    "partition": "node,class,count",
}
DEVICES = {"raspberry-pi-4b": 2.0, "jetson-orin-nano": 0.5, "laptop": 0.2}
"""Seconds of one work item."""
MODEL_BYTES = 1_000_000
EXPERIMENT = """name = "made-up"
seed = {seed}
method = "{method}"

[network]
link = "home"
"""


def make_run(
    folder: Path,
    *,
    clients: int = 24,
    rounds: int = 30,
    method: str = "fedavg",
    seed: int = 0,
    pace: float = 1.0,
) -> Path:
    """Write the folder and return it. Client 1 is down in round 3; its report is missing there.

    A round lasts `pace` x 5 seconds: everyone computes, then uploads for a second; the server's transfers
    to all clients overlap. Accuracy reaches 0.9 after two thirds of the rounds.
    """
    folder.mkdir(parents=True)
    tables: dict[str, list[Sequence[object]]] = {name: [] for name in COLUMNS}
    ids, kinds = range(1, clients + 1), list(DEVICES)
    round_s = 5.0 * pace
    for r in range(rounds):
        _one_round(
            tables, r, r * round_s, [(i, kinds[i % 3]) for i in ids if (i, r) != (1, 3)], clients, round_s
        )
    tables["events"] += [(3 * round_s, "crash", 1, ""), (4 * round_s, "back", 1, "life 1")]
    end_s, chance = rounds * round_s, generator(seed, "made-up run")
    for r in range(rounds + 1):
        value = min(0.95, 0.1 + 0.8 * 1.5 * r / rounds + 0.01 * float(chance.random()))
        bytes_sent, joules = 2 * clients * MODEL_BYTES * r, 100.0 * r
        loss = 2.3 * (1 - value)
        tables["curve"].append((r * round_s, r, value, loss, value - 0.1, value + 0.04, bytes_sent, joules))
        tables["evaluations"].append((r * round_s, 0, r, value, loss))
    _final_tables(tables, clients, rounds, end_s, seed)
    for name, rows in tables.items():
        write_table(folder, name, rows)
    reached = next(row[0] for row in tables["curve"] if row[2] >= 0.9)
    (folder / "experiment.toml").write_text(EXPERIMENT.format(seed=seed, method=method))
    (folder / "run.json").write_text(json.dumps(_run_json(tables, clients, end_s, reached, method, seed)))
    return folder


def write_table(folder: Path, name: str, rows: Iterable[Sequence[object]]) -> None:
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS[name].split(","))
        writer.writerows(rows)


def _one_round(
    tables: dict[str, list[Sequence[object]]],
    r: int,
    start: float,
    present: Sequence[tuple[int, str]],
    clients: int,
    round_s: float,
) -> None:
    """Downloads for one second, then each device's work item, then one second of upload."""
    scale = round_s / 5.0
    tables["spans"] += [(0, "send", start, start + scale, "GlobalModel")] * clients
    for i, device in present:
        work_end = start + scale * (1 + DEVICES[device])
        tables["spans"].append((i, "compute", start + scale, work_end, "LocalSGD"))
        tables["spans"].append((i, "send", work_end, work_end + scale, "LocalModel"))
    end, got = start + 0.99 * round_s, len(present)
    values = {
        "round": r,
        "reports": got,
        "missing": clients - got,
        "train_loss": 2.0 / (r + 1),
        "staleness": r % 4,
    }
    tables["metrics"] += [(end, 0, name, value) for name, value in values.items()]


def _final_tables(
    tables: dict[str, list[Sequence[object]]], clients: int, rounds: int, end_s: float, seed: int
) -> None:
    kinds, sent = list(DEVICES), rounds * MODEL_BYTES
    tables["nodes"].append(
        (0, "server", "laptop", 0, 0.0, end_s, clients * sent, clients * sent, 50.0, None, None)
    )
    for i in range(1, clients + 1):
        device = kinds[i % 3]
        busy, joules = rounds * DEVICES[device] * end_s / (5.0 * rounds), 10.0 * i
        metric = 0.7 + 0.25 * float(generator(seed, "final metric", i).random())
        row = (i, "client", device, 50, busy, end_s - busy, sent, sent, joules, metric, 0.3)
        tables["nodes"].append(row)
        tables["traffic"].append((0, i, "GlobalModel", rounds, sent, sent + 60 * rounds))
        tables["traffic"].append((i, 0, "LocalModel", rounds, sent, sent + 70 * rounds))
        tables["partition"] += [(i, c, 5 + (i * c) % 20) for c in range(10) if (i + c) % 3]


def _run_json(
    tables: dict[str, list[Sequence[object]]],
    clients: int,
    end_s: float,
    reached: object,
    method: str,
    seed: int,
) -> dict[str, object]:
    last = tables["curve"][-1]
    summary = {
        "method": method,
        "runtime": "virtual",
        "seed": seed,
        "nodes": clients + 1,
        "time_s": end_s,
        "target": {"metric": "accuracy", "value": 0.9},
        "time_to_target_s": reached,
        "final_accuracy": last[2],
        "final_metric": last[2],
        "final_loss": last[3],
        "spread": {"worst_tenth": last[4], "mean": last[2], "best": last[5]},
        "messages": 1440,
        "payload_bytes": last[6],
        "wire_bytes": 1.06 * last[6],
        "joules": last[7],
        "busy_s": sum(row[4] for row in tables["nodes"]),
        "idle_s": sum(row[5] for row in tables["nodes"]),
        "status": "finished",
        "reason": "all rounds",
        "run_dir": "runs/made-up",
        "wall_s": 2.5,
    }
    versions = {"edgefl": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"}
    return {
        "schema": 1,
        "status": "finished",
        "reason": "all rounds",
        "versions": versions,
        "machine": {"system": "Linux", "cores": 2},
        "summary": summary,
    }
