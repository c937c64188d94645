"""Messages per processor second through the whole path: program, node, sizes, links, latency, inbox, records.

Each node talks to 4 neighbours, round after round, with a few bytes. Beside it: the bare event loop of the
same messages, which is a heap of tuples and nothing else. Then what a message costs more with 10,000 nodes
than with 100, and the memory of a node that waits.
"""

from __future__ import annotations

import gc
import heapq
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from support.measure import Line, arguments, interleaved, show
from support.runs import built, run_seconds

from edgefl.experiment.observer import RunObserver
from edgefl.runtimes.virtual import VirtualRuntime

CHATTER = str(Path(__file__).parent / "support" / "chatter.py")
DEGREE = 4


def tables(nodes: int, rounds: int, link_model: str, degree: int = DEGREE) -> dict[str, Any]:
    """Nodes that talk, on a random regular graph."""
    return {
        "method": {"name": CHATTER},
        "fleet": {"devices": {"raspberry-pi-4b": nodes}},
        "network": {
            "topology": {"name": "random-regular", "degree": degree},
            "link_model": link_model,
            "link": {"like": "home", "latency": "10 ms", "jitter": 0.2},
        },
        "model": {"name": "linear"},
        "data": {"name": "digits", "partition": {"name": "iid", "allow_reuse": True, "reuse_examples": 1}},
        "evaluate": {"every_rounds": rounds, "max_nodes": 1},
        "stop": {"rounds": rounds},
    }


def per_second(nodes: int, rounds: int, link_model: str) -> Callable[[], float]:
    """A case: messages per second of a run."""
    run = built(tables(nodes, rounds, link_model))

    def measured() -> float:
        start = time.process_time()
        run_seconds(run)
        return nodes * DEGREE * rounds / (time.process_time() - start)

    return measured


def bare_heap(nodes: int, messages: int) -> Callable[[], float]:
    """A case: events per second of a heap with as many events under way as nodes talk."""

    def run() -> float:
        heap = [(i * 1e-6, i, i) for i in range(nodes * DEGREE)]
        heapq.heapify(heap)
        start = time.process_time()
        for k in range(messages):
            time_s, _, node = heapq.heappop(heap)
            heapq.heappush(heap, (time_s + 0.01, k, node))
        return messages / (time.process_time() - start)

    return run


def idle_bytes(nodes: int) -> float:
    """Resident bytes that a node adds while it waits, beyond the vectors of its model: none is sent here."""
    run = built(tables(nodes, 1, "fifo"))
    gc.collect()
    before = psutil.Process().memory_info().rss
    runtime = VirtualRuntime(run.plan, RunObserver(run), run.executor)
    for node in range(nodes):
        runtime.begin_life(node)
    while runtime._soon:
        call, args = runtime._soon.popleft()
        call(*args)
    gc.collect()
    used = psutil.Process().memory_info().rss - before
    runtime.end_all()
    return used / nodes


def main() -> None:
    options = arguments(__doc__ or "")
    lines = []
    wanted = options.only
    for model, nodes, rounds, least, aim in (
        ("fifo", 1000, 15, 60_000, 200_000),
        ("local-fair", 1000, 15, 60_000, 200_000),
        ("fair", 100, 25, 10_000, 30_000),
    ):
        if wanted not in model:
            continue
        cases = {"ours": per_second(nodes, rounds, model), "heap": bare_heap(nodes, 200_000)}
        found = interleaved(cases, options.repeats)
        lines.append(
            Line(f"{model}, {nodes:,} nodes x {DEGREE}", found["ours"], "messages/s", least=least, aim=aim)
        )
        lines.append(
            Line("  share of a bare heap's events/s", found["ours"], "messages/s", "bare heap",
                 found["ours"] / found["heap"])
        )  # fmt: skip
    if wanted in "growth":
        cases = {"few": per_second(100, 100, "fifo"), "many": per_second(10_000, 2, "fifo")}
        found = interleaved(cases, options.repeats)
        extra = 1e6 / found["many"] - 1e6 / found["few"]
        lines.append(
            Line("more per message, 10,000 nodes against 100, fifo", extra, "us", least=4, aim=2,
                 smaller_is_better=True)
        )  # fmt: skip
    if wanted in "memory":
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # memory that was freed hides nothing
            kb = pool.apply(idle_bytes, (10_000,)) / 1e3
        lines.append(Line("a waiting node", kb, "KB", least=100, aim=20, smaller_is_better=True))
    show(lines, options.json)


if __name__ == "__main__":
    main()
