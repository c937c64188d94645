"""How time and memory grow: with the nodes, with the degree of the graph, and with the model.

Nodes and degree: nodes that talk over fifo links; processor seconds per message, and resident bytes per node
that the run adds. Parameters: FedAvg on 10 nodes, one local step of 16; processor seconds per client update,
and resident bytes that the run adds per parameter. Each row runs in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import psutil
from messages import tables as talking
from support.measure import Line, arguments, one_thread, show
from support.runs import built, fedavg_tables, run_seconds

from edgefl.allocator import keep_memory

NODES = (10, 100, 1_000, 10_000)
DEGREES = (2, 8, 32, 64)
HIDDEN = {1_000: [13], 10_000: [133], 100_000: [1330], 1_000_000: [3000, 260], 10_000_000: [3000, 3200]}


def cost(tables: dict[str, Any], units: float) -> tuple[float, float]:
    """Processor seconds per unit of work, and resident bytes that the run adds at its end."""
    keep_memory()
    with one_thread():
        run = built(tables)
        before = psutil.Process().memory_info().rss
        start = time.process_time()
        run_seconds(run)
        return (time.process_time() - start) / units, psutil.Process().memory_info().rss - before


def row(kind: str, size: int) -> tuple[float, float]:
    """(processor seconds per message or update, bytes per node or parameter)."""
    if kind == "parameters":
        model = {"name": "mlp", "hidden": HIDDEN[size]}
        tables = fedavg_tables(10, cohort=10, rounds=2, model=model, data={"name": "digits"})
        tables["train"]["local_steps"] = 1
        small = {**tables, "model": {"name": "mlp", "hidden": [2]}}
        cost(small, 20)  # what a process compiles once is not a price of the model's size
        seconds, added = cost(tables, 20)
        return seconds, added / size
    nodes, degree = (size, 4) if kind == "nodes" else (500, size)
    rounds = max(1, 80_000 // (nodes * degree))
    seconds, added = cost(talking(nodes, rounds, "fifo", degree), nodes * degree * rounds)
    return seconds, added / nodes


def main() -> None:
    options = arguments(__doc__ or "")
    lines = []
    for kind, sizes in (("nodes", NODES), ("degree", DEGREES), ("parameters", tuple(HIDDEN))):
        if options.only not in kind:
            continue
        for size in sizes:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds, size_bytes = pool.apply(row, (kind, size))
            what, whose = ("update", "parameter") if kind == "parameters" else ("message", "node")
            name = f"{kind} {size:>10,}: {size_bytes:,.0f} bytes per {whose} added"
            lines.append(Line(name, 1e6 * seconds, f"us per {what}"))
    show(lines, options.json)


if __name__ == "__main__":
    main()
