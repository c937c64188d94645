"""Finding a commit rate while training goes on: a curve through losses, a reward, and a search that climbs.

Source: ADSP (Hu, Wang, Wu 2020, https://arxiv.org/abs/1911.06949).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from edgefl.nodes import Node

INVALID = -1e5
"""Reward of losses through which no such curve goes."""


def check_period_s(node: Node, given_s: float | None) -> float:
    """Gamma, seconds between check points: 30 planned steps of the median client where not given."""
    if given_s is not None:
        return given_s
    return 30 * statistics.median(map(node.fleet.step_s, node.fleet.ids("client")))


def reward(start_s: float, half_s: float, losses: Sequence[float], target_loss: float) -> float:
    """The inverse of the seconds from 0 at which the curve through three losses reaches the target.

    losses: at start_s, start_s + half_s and start_s + 2 half_s. The curve is 1 / (a^2 t + b) + d, which goes
    through three points at equal distances in one way; INVALID where they do not fall ever more slowly, or
    where it stays above the target (a number above 0).

    >>> curve = [1 / (0.03 * t + 0.5) + 0.2 for t in (10, 25, 40)]
    >>> round(reward(10, 15, curve, 0.3), 7)
    0.0031579
    """
    l0, l1, l2 = losses
    if not (math.isfinite(l0 + l1 + l2) and l0 > l1 > l2 and l0 + l2 > 2 * l1):
        return INVALID
    d = (l1 * (l0 + l2) - 2 * l0 * l2) / (2 * l1 - l0 - l2)
    if not d < min(target_loss, l2):
        return INVALID
    a_squared = (1 / (l2 - d) - 1 / (l0 - d)) / (2 * half_s)
    b = 1 / (l0 - d) - a_squared * start_s
    way = 1 / (target_loss - d) - b
    return a_squared / way if way > 0 else INVALID


def implicit_momentum(intervals: Iterable[float]) -> float:
    """The momentum that commits of accumulated updates come to: 1 - 1 / (1 + (1 - 1/M) sum of intervals).

    intervals: Gamma / (DeltaC_i v_i) of each of the M workers; v_i: its steps per unit of time.

    >>> round(implicit_momentum([0.05] * 18), 3), implicit_momentum([0.05])
    (0.459, 0.0)
    """
    each = list(intervals)
    return 1 - 1 / (1 + (1 - 1 / len(each)) * math.fsum(each))


class RateSearch:
    """c: commits of each worker in the period at hand. mode: "warm" (the first period: its losses are often
    not convex), "trial" (c is being tried) or "hold".

    A search tries 1, 2, ... for a period each, as long as the reward grows, and keeps the best. One begins
    after the first period, search_every_s seconds after the last one did, and when the loss has risen by
    `rise` (0.3: by 30 %) from one check point to the next. fixed: this c always, without a search.
    target_loss: None: a tenth of the first loss.
    """

    def __init__(
        self,
        search_every_s: float,
        target_loss: float | None,
        rise: float,
        fixed: int | None,
        saved: dict[str, Any] | None,
    ) -> None:
        c, mode = (1, "warm") if fixed is None else (fixed, "hold")
        never = {"best": None, "began_s": 0.0, "loss": math.inf}
        s: dict[str, Any] = saved or {"c": c, "mode": mode, "target": target_loss, **never}
        self._every_s, self._rise, self._fixed = search_every_s, rise, fixed
        self.c: int = s["c"]
        self.mode: Literal["warm", "trial", "hold"] = s["mode"]
        self._best: float | None = s["best"]
        self._began_s: float = s["began_s"]
        self._loss: float = s["loss"]
        self._target: float | None = s["target"]

    @property
    def instants(self) -> tuple[float, ...]:
        """When in the period at hand the loss is wanted, in parts of it; its end is always last."""
        if self._target is None:
            return (0.0, 1.0)
        return (0.0, 0.5, 1.0) if self.mode == "trial" else (1.0,)

    def end(self, start_s: float, period_s: float, losses: Sequence[float], most: int) -> float | None:
        """A period ends: decide the next one's c, at most `most`. Returns a trial's reward.

        losses: at `instants`.
        """
        if self._fixed is not None:
            return None
        found = None
        if self._target is None:
            self._target = losses[0] / 10
        if self.mode == "trial":
            found = reward(start_s, period_s / 2, losses, self._target)
            self._decide(found, most)
        elif self.mode == "warm" or self._is_due(start_s + period_s, losses[-1]):
            self.c, self.mode, self._best, self._began_s = 1, "trial", None, start_s + period_s
        self._loss, self.c = losses[-1], min(self.c, most)
        return found

    def restart(self) -> None:
        """The period at hand begins again, and with it the search of which it was a trial."""
        if self.mode == "trial":
            self.c, self._best = 1, None

    def _decide(self, found: float, most: int) -> None:
        """Go on to c + 1, or keep the best."""
        if self._best is not None and found <= self._best:
            self.c, self.mode = self.c - 1, "hold"
        elif self.c >= most:
            self.mode = "hold"
        else:
            self.c, self._best = self.c + 1, found

    def _is_due(self, now_s: float, loss: float) -> bool:
        return now_s - self._began_s >= self._every_s or not loss < (1 + self._rise) * self._loss

    def state(self) -> dict[str, Any]:
        """For a save."""
        return {
            "c": self.c,
            "mode": self.mode,
            "best": self._best,
            "began_s": self._began_s,
            "loss": self._loss,
            "target": self._target,
        }
