"""What the process that leads is told by the others at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Elsewhere:
    """What another process's nodes have come to, beside their rows."""

    busy_s: dict[int, float]
    stale: dict[str, int]
    frame_bytes: int

    @classmethod
    def of(cls, report: Any) -> Elsewhere:
        """From its report; raises ValueError, KeyError, TypeError or AttributeError for anything else."""
        busy_s = {int(node): float(s) for node, s in report["busy_s"].items()}
        stale = {str(kind): int(count) for kind, count in report["stale"].items()}
        return cls(busy_s, stale, int(report["frame_bytes"]))
