"""Two processes that go through many small runs of shipped models, with real gRPC between them."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from pathlib import Path
from typing import Any

from toy import Watcher

sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
from split_lab import model_plan

from edgefl.learning.executors import Inline
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.local import free_addresses, run_place
from edgefl.runtimes.grpc.place import Place

START_S = 240.0
"""A busy machine may take minutes to import PyTorch."""


class Recorder(Watcher):
    """An observer of a process: it has nothing to tell the others."""

    def export(self) -> dict[str, Any]:
        return {}

    def merge(self, rows: dict[str, Any]) -> None:
        """Nothing to take in."""


class ProcessPair:
    """This process, which hosts node 0, and another one, which hosts all others; for any number of runs."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._other = context.Process(target=_other, args=(there,), daemon=True)
        self._other.start()

    def run(self, recipe: dict[str, Any]) -> dict[int, Any]:
        """A run of model_plan(**recipe): what each node came to, else the last model that it published."""
        plan = model_plan(**recipe)
        addresses = free_addresses(2)
        self._pipe.send((recipe, addresses))
        outcome = _run_place(plan, 0, addresses)
        assert self._pipe.poll(START_S), "the other process says nothing"
        said = self._pipe.recv()
        assert said is None, said
        return {n: model for n, (_, _, model) in outcome.last_models.items()} | dict(outcome.results)

    def close(self) -> None:
        self._pipe.send(None)
        self._other.join(START_S)


def _other(pipe: Any) -> None:
    """The life of the other process."""
    import torch

    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        recipe, addresses = task
        try:
            _run_place(model_plan(**recipe), 1, addresses)
            pipe.send(None)
        except Exception:
            pipe.send(traceback.format_exc())


def _run_place(plan: Any, index: int, addresses: tuple[str, ...]) -> Any:
    nodes_of = ((0,), tuple(range(1, len(plan.nodes))))
    place = Place("pair", index, addresses, nodes_of)
    limits = Limits(connect_timeout_s=START_S)
    return run_place(plan, Recorder(), Inline(plan.learner), place, digest="pair", limits=limits)
