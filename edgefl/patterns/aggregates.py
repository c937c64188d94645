"""What a server makes of one round's reports: the one place in which FedAvg and its siblings differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from edgefl.nodes import Node
from edgefl.parameters import Vector


class Aggregate(Protocol):
    """One round's reports, as they come in."""

    def add(self, r: Any, y: Vector) -> None:
        """Take in a report, and the model that it carries."""
        ...

    def value(self) -> tuple[Vector, Any] | None:
        """The new model and the rule's new state; None where the reports do not suffice: a void round."""
        ...


Rule = Callable[[Node, Vector, Any], Aggregate]
"""Begins a round, given the node, the model, and what the rule keeps from round to round (None at first)."""
