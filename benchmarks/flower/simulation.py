"""FedAvg in Flower's simulation: python simulation.py PARTS.npz TURNS ROUNDS STEPS BATCH RATE OUT.json

PARTS.npz: x_i and y_i of each client. Writes client updates per second of each turn, start-up not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn


@cache
def parts(path: str) -> dict[str, torch.Tensor]:
    """All clients' data, read once in each process."""
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def client_app(path: str, steps: int, batch: int, rate: float) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        part = int(context.node_config["partition-id"])
        x, y = parts(path)[f"x_{part}"], parts(path)[f"y_{part}"]
        model = model_of()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for step in range(steps):
            rows = torch.arange(step * batch, (step + 1) * batch) % len(y)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        content: dict[str, Any] = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


def server_app(turns: int, rounds: int, clients: int, out: Path) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, _: Context) -> None:
        arrays = ArrayRecord(model_of().state_dict())
        found = []
        for turn in range(turns + 1):
            strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
            start = time.perf_counter()
            strategy.start(grid, arrays, num_rounds=rounds)
            if turn:  # the first one starts Ray's actors
                found.append(rounds * clients / (time.perf_counter() - start))
        out.write_text(json.dumps(found), encoding="utf-8")

    return app


def main() -> None:
    path, turns, rounds, steps, batch, rate, out = sys.argv[1:]
    clients = len(parts(path)) // 2
    run_simulation(
        server_app=server_app(int(turns), int(rounds), clients, Path(out)),
        client_app=client_app(path, int(steps), int(batch), float(rate)),
        num_supernodes=clients,
        backend_config={
            "init_args": {"num_cpus": os.cpu_count()},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main()
