"""The process that leads: what it hears of the others' nodes, and how it can be missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgefl.errors import RunError
from edgefl.messages.base import Message
from edgefl.network import MeasuredLink
from edgefl.nodes.plan import Observer
from edgefl.parameters import Vector

LEAD = 0
"""The process that keeps the run's records."""


class MergingObserver(Observer, Protocol):
    """An observer whose records travel to the process that leads."""

    def export(self) -> dict[str, Any]: ...
    def resume(self, records: dict[str, Any], busy_s: dict[int, float]) -> None: ...
    def merge(self, rows: dict[str, Any]) -> None: ...
    def measured(self, nodes: Sequence[int], link: MeasuredLink) -> None: ...


@dataclass(frozen=True)
class LastModel(Message):
    """What a node published last, sent to the lead at the end. time_s: when it came to that step."""

    once_by = ("node",)
    node: int
    time_s: float
    step: int
    parameters: Vector


class RemoteFailure(RunError):
    """A program failed in another process. `trace` is its traceback there."""

    def __init__(self, text: str, trace: str) -> None:
        self.trace = trace
        super().__init__(text)


class LeadLost(RunError):
    """The process that leads stayed away: here the run cannot end as it should."""
