"""How far a run is: what a Progress is told, kept as one value that can be shown or sent on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """A run's progress at one moment. limit_s, limit_steps: where it ends at the latest, None: not by that.

    time_s: on the run's clock; wall_s: on this machine's. value: the metric as last evaluated, None before.
    """

    metric: str = ""
    target: float | None = None
    limit_s: float | None = None
    limit_steps: int | None = None
    time_s: float = 0.0
    step: int = 0
    value: float | None = None
    wall_s: float = 0.0

    @property
    def share(self) -> float | None:
        """How much of the run is done, 0 to 1, by the limit that is nearest; None where it has none.

        >>> State(limit_s=100.0, limit_steps=10, time_s=20.0, step=5).share
        0.5
        """
        shares = []
        if self.limit_s:
            shares.append(self.time_s / self.limit_s)
        if self.limit_steps:
            shares.append(self.step / self.limit_steps)
        return min(max(shares), 1.0) if shares else None
