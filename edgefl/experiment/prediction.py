"""Predicted beside measured: a run on the wall clock, and what virtual time says of the same experiment.

The programs go through virtual time without training, as for a plan. All figures are per round, so that it
does not matter where the run was stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from edgefl.errors import EdgeflError
from edgefl.experiment.build import Built
from edgefl.experiment.energy import node_joules
from edgefl.experiment.pace import Paces, mean_round_s, mean_rounds
from edgefl.experiment.preview import go_through
from edgefl.runtimes.outcome import Outcome

MOST_ROUNDS = 100
"""Rounds that a prediction goes through."""


@dataclass(frozen=True)
class Figures:
    """One node's share of a round; round_s: None where the node publishes no model of its own."""

    round_s: float | None
    busy_s: float
    sent_bytes: float
    joules: float | None


@dataclass(frozen=True)
class Side:
    """One of the two: how a round went. sent_bytes: of all nodes."""

    rounds: float
    round_s: float
    sent_bytes: float
    nodes: tuple[Figures, ...]

    @property
    def busy_s(self) -> float:
        """Computing of all nodes."""
        return sum(figures.busy_s for figures in self.nodes)


def beside(
    built: Built,
    outcome: Outcome,
    paces: Paces,
    measured_j: Mapping[int, float],
    *,
    same_devices: bool = True,
) -> tuple[dict[str, Any] | None, list[tuple[Any, ...]]]:
    """What summary and table say of a run that has ended: (summary, rows of predicted.csv).

    paces: of the run. same_devices: whether it ran on devices like the file's, or made as slow; if not, times
    differ for that reason, and are given without an error.
    None and no rows where no round ended, or where the programs end without training.
    """
    measured = _side(built, outcome, paces, measured_j)
    if measured is None:
        return None, []
    try:
        rounds = min(MOST_ROUNDS, round(measured.rounds))
        twin, watcher = go_through(built, max(1, rounds))
    except EdgeflError as error:
        return {"failed": str(error)}, []
    predicted = _side(built, twin, watcher.published_at, {})
    if predicted is None:
        return {"failed": f"no round ended: {twin.reason}"}, []
    summary = {
        "link_model": built.plan.network.link_model,
        "rounds": measured.rounds,
        "same_devices": same_devices,
        "round_s": _pair(measured.round_s, predicted.round_s, same_devices),
        "sent_bytes": _pair(measured.sent_bytes, predicted.sent_bytes),
        "busy_s": _pair(measured.busy_s, predicted.busy_s, same_devices),
    }
    both = zip(measured.nodes, predicted.nodes, strict=True)
    return summary, [(i, *_interleaved(one, other)) for i, (one, other) in enumerate(both)]


def _side(built: Built, outcome: Outcome, paces: Paces, measured_j: Mapping[int, float]) -> Side | None:
    if not paces:
        return None
    rounds = mean_rounds(paces)
    round_s = {node: time_s / step for node, (time_s, step) in paces.items()}
    sent = outcome.traffic.sent_bytes
    nodes = []
    for i, spec in enumerate(built.plan.nodes):
        busy_s, num_bytes = float(outcome.busy_s.get(i, 0.0)), outcome.traffic.node_bytes(i)
        joules = measured_j.get(i, node_joules(spec.profile, outcome.time_s, busy_s, num_bytes))
        per_round = None if joules is None else joules / rounds
        nodes.append(Figures(round_s.get(i), busy_s / rounds, sent.get(i, 0) / rounds, per_round))
    mean_s = mean_round_s(paces, built.plan.method.evaluates)
    return Side(rounds, mean_s, sum(figures.sent_bytes for figures in nodes), tuple(nodes))


def _pair(measured: float, predicted: float, compared: bool = True) -> dict[str, float | None]:
    error = predicted / measured - 1 if measured and compared else None
    return {"measured": measured, "predicted": predicted, "error": error}


def _interleaved(measured: Figures, predicted: Figures) -> tuple[Any, ...]:
    return tuple(x for pair in zip(astuple(measured), astuple(predicted), strict=True) for x in pair)
