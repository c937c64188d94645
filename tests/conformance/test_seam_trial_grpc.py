"""The seven toys of SYSTEMS over real gRPC: the same programs, each node behind a port of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from programs import SYSTEMS, System
from toy import Watcher, toy_plan

from edgefl.nodes import Node
from edgefl.runtimes.grpc.local import run_here


class _Recorder(Watcher):
    """A watcher whose records need not travel: all nodes are in this process."""

    def export(self) -> dict[str, Any]:
        return {}

    def merge(self, rows: dict[str, Any]) -> None:
        """Nothing: the results are kept by the programs themselves."""


def _keeping(program: Callable[..., Any], results: dict[int, Any]) -> Callable[..., Any]:
    async def kept(node: Node) -> Any:
        results[node.id] = await program(node)
        return results[node.id]

    return kept


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: s.name)
def test_it_does_over_grpc_what_its_paper_says(system: System):
    results: dict[int, Any] = {}
    programs = [_keeping(program, results) for program in system.programs]
    plan = toy_plan(programs, system.messages, ends_with=system.ends_with)
    watchers = [_Recorder() for _ in plan.nodes]
    outcome = run_here(plan, watchers, None, run_id=f"trial {system.name}", digest=system.name)
    assert outcome.status == "finished"
    system.check(results)
