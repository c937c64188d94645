"""Robust aggregation: a round's models side by side, as rows, and a rule that a few cannot move far.

Unweighted by design: sample counts are claims. Not streaming: the models of a round are in memory together.
A round with fewer reports than the rule needs is void, never silently a mean. Rows are in ascending node
id, so that the order of arrival changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from edgefl.errors import ConfigError
from edgefl.nodes import Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.parameters.packing import pack, unpack
from edgefl.patterns.rounds import RoundConfig, refuse_void_rounds


class HostileConfig(RoundConfig):
    """FedAvg's rules of a round, and how many hostile reports the rule must stand."""

    num_hostile: int = Field(default=1, ge=0)
    """f: most hostile clients in a round."""


class Rows:
    """Collects the models of a round; a rule fills in `combine` and `least`."""

    def __init__(self, node: Node, w: Vector, state: Any) -> None:
        self.config, self._w = node.config, w
        self._models: dict[int, Vector] = {}

    def add(self, r: Any, y: Vector) -> None:
        self._models[r.sender] = y

    def value(self) -> tuple[Vector, None] | None:
        if len(self._models) < self.least(self.config):
            return None
        models = [self._models[k] for k in sorted(self._models)]
        return unpack(self.combine(torch.stack([pack(y) for y in models])), models[0]), None

    @staticmethod
    def least(config: Any) -> int:
        """Fewest reports that the rule works with."""
        return 1

    def combine(self, rows: Tensor) -> Tensor:
        """(d,) one model of n, rows (n, d); n is at least `least`."""
        raise NotImplementedError


def refuse_small_cohorts(plan: RunPlan, least: int, key: str) -> None:
    """Refuse a rule for which every round would be void."""
    refuse_void_rounds(plan)
    clients, config = len(plan.ids("client")), plan.config
    size = max(round(config.client_fraction * clients), 1)
    if size < least:
        accepted = f"at least {least} reports a round are needed, {size} of {clients} clients are asked"
        raise ConfigError(f"method.{plan.method.name}.{key}", getattr(config, key), accepted)
