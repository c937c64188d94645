"""The network of one run: who talks to whom, over what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from edgefl.network.link import Access
from edgefl.network.topology import Topology
from edgefl.network.traces import Trace

LinkModel = Literal["fair", "local-fair", "fifo"]


@dataclass(frozen=True)
class NetworkPlan:
    """Topology, access links and link model of a run.

    access: one per node, by id. segments: rate of each shared segment in bytes per second, by name.
    path_bytes_per_s: most of one flow between any two nodes. caps: of pairs (sender, receiver), instead.
    traces: factors on a node's rates over time, both ways, by id.
    """

    topology: Topology
    access: tuple[Access, ...]
    link_model: LinkModel = "fair"
    segments: Mapping[str, float] = field(default_factory=dict)
    path_bytes_per_s: float = math.inf
    caps: Mapping[tuple[int, int], float] = field(default_factory=dict)
    traces: Mapping[int, Trace] = field(default_factory=dict)

    def cap(self, sender: int, receiver: int) -> float:
        """Most bytes per second of one flow of a pair, whatever its ends could do."""
        return self.caps.get((sender, receiver), self.path_bytes_per_s)

    def latency_s(self, sender: int, receiver: int) -> float:
        """Planned one-way latency of a pair, in seconds, without jitter."""
        return self.access[sender].latency_s + self.access[receiver].latency_s

    def rate_bytes_per_s(self, sender: int, receiver: int) -> float:
        """Planned rate of one flow that has the links to itself."""
        ends = (self.access[sender], self.access[receiver])
        rates = [ends[0].up_bytes_per_s, ends[1].down_bytes_per_s]
        rates += [self.segments[e.segment] for e in ends if e.segment is not None]
        return min(*rates, self.cap(sender, receiver))
