"""What the process that leads is told by the others at the end of a run, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from edgefl.nodes.traffic import Traffic
from edgefl.runtimes.grpc.lead import LastModel, MergingObserver
from edgefl.runtimes.interpreter import Interpreter
from edgefl.runtimes.outcome import Outcome


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


def report_of(run: Interpreter, observer: MergingObserver, frame_bytes: int) -> dict[str, Any]:
    """This process's records, as JSON can hold them."""
    return {
        "rows": observer.export(),
        "traffic": [[*key, *row] for key, row in run.traffic.table.items()],
        "busy_s": {i: state.processor.busy_s for i, state in run.states.items()},
        "stale": run.stale(),
        "frame_bytes": frame_bytes,
    }


def add_traffic(traffic: Traffic, rows: list[list[Any]]) -> None:
    """Count what a report says was sent."""
    for sender, receiver, kind, messages, payload, encoded in rows:
        traffic.add(sender, receiver, kind, payload, encoded, messages)


def outcome_of(
    run: Interpreter,
    frame_bytes: int,
    elsewhere: Iterable[Elsewhere],
    models: Iterable[LastModel],
    end_s: float,
) -> Outcome:
    """What a run came to, its other processes' part included. frame_bytes: this process's."""
    busy = {i: state.processor.busy_s for i, state in run.states.items()}
    stale = run.stale()
    for there in elsewhere:
        busy |= there.busy_s
        frame_bytes += there.frame_bytes
        for kind, count in there.stale.items():
            stale[kind] = stale.get(kind, 0) + count
    return Outcome(
        status="finished" if run.stop_reason is None else "stopped",
        reason=run.stop_reason or "the method ended",
        time_s=end_s,
        results=run.results,
        traffic=run.traffic,
        busy_s=dict(sorted(busy.items())),
        stale=stale,
        dropped=dict(run.dropped),
        last_models={m.node: (m.time_s, m.step, m.parameters) for m in models},
        frame_bytes=frame_bytes,
    )
