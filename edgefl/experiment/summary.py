"""What a run comes to: its summary, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from edgefl.data import label_table
from edgefl.experiment.build import Built
from edgefl.experiment.energy import node_joules, total, word
from edgefl.experiment.folder import RunFolder
from edgefl.experiment.observer import RunObserver, spread, value_of
from edgefl.experiment.own_mix import own_mix_accuracy
from edgefl.experiment.pace import mean_round_s, mean_rounds
from edgefl.runtimes.outcome import Outcome


def summarise(
    built: Built, observer: RunObserver, outcome: Outcome, runtime: str, run_dir: Path, wall_s: float
) -> dict[str, Any]:
    """A run in one dictionary that JSON can hold; times in seconds, None for what is not known.

    rounds, round_s: that a node published in the mean, and what one took (see pace). final_metric,
    final_loss: means over the nodes evaluated at the end. own_mix_accuracy: see own_mix. busy_s,
    idle_s: device-seconds of the whole fleet. wire_bytes: modelled. joules: of the nodes whose machine
    measures them or whose profile has power; energy: in which of these ways, "measured", "modelled", or both.
    """
    target, metric = built.experiment.stop.target, built.metric
    finals = list(observer.final_models.values())
    values = [value_of(e, metric) for e in finals]
    worst_tenth, mean, best = spread(values, metric) if values else (None, None, None)
    accuracies = [e.metrics["accuracy"] for e in finals if "accuracy" in e.metrics]
    nodes = list(_node_rows(built, observer, outcome))
    paces = observer.paces
    stale, dropped = sum(outcome.stale.values()), sum(outcome.dropped.values())
    return {
        "name": built.experiment.name,
        "method": built.plan.method.name,
        "runtime": runtime,
        "seed": built.plan.seed,
        "nodes": len(built.plan.nodes),
        "time_s": outcome.time_s,
        "rounds": mean_rounds(paces) if paces else 0,
        "round_s": mean_round_s(paces, built.plan.method.evaluates) if paces else None,
        "metric": metric,
        "target": None if target is None else {"metric": metric, "value": target.value},
        "time_to_target_s": observer.time_to_target_s,
        "final_accuracy": sum(accuracies) / len(accuracies) if accuracies else None,
        "final_metric": mean,
        "own_mix_accuracy": own_mix_accuracy(built, observer.evaluated),
        "final_loss": sum(e.loss for e in finals) / len(finals) if finals else None,
        "spread": {"worst_tenth": worst_tenth, "mean": mean, "best": best},
        "messages": outcome.traffic.messages,
        "payload_bytes": outcome.traffic.payload_bytes,
        "encoded_bytes": outcome.traffic.encoded_bytes,
        "wire_bytes": outcome.wire_bytes,
        "joules": total(row[8] for row in nodes),
        "energy": word(row[11] for row in nodes),
        "busy_s": sum(row[4] for row in nodes),
        "idle_s": sum(row[5] for row in nodes),
        "stale_messages": stale,
        "dropped_messages": dropped,
        "spans_left_out": observer.num_spans_left_out,
        "status": outcome.status,
        "reason": outcome.reason,
        "run_dir": str(run_dir),
        "wall_s": wall_s,
    }


def write_results(folder: RunFolder, built: Built, observer: RunObserver, outcome: Outcome) -> Unwritten:
    """Write the model and the tables of a run that has ended: first what says most in the least room.

    What cannot be written, as on a full disk, is left out and returned; all else is there.
    """
    traffic = outcome.traffic.table
    tables: tuple[tuple[str, Iterable[Sequence[Any]]], ...] = (
        ("nodes", _node_rows(built, observer, outcome)),
        ("curve", observer.curve),
        ("traffic", ((*key, *traffic[key]) for key in sorted(traffic))),
        ("partition", _partition_rows(built)),
        ("evaluations", observer.evaluations),
        ("events", observer.events),
        ("metrics", observer.metrics),
        ("spans", observer.spans),
    )
    model, unwritten = observer.joint_model(), Unwritten()
    if model is not None:
        with unwritten.tried():
            folder.write_bytes("model.safetensors", save(model.named()))
    for name, rows in tables:
        with unwritten.tried():
            folder.write_table(name, rows)
    return unwritten


class Unwritten:
    """The files of a run that found no room, and why."""

    def __init__(self) -> None:
        self.errors: list[OSError] = []

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Inside, a file is written; where it cannot be, the block ends and the next one is tried."""
        try:
            yield
        except OSError as error:
            self.errors.append(error)

    def __str__(self) -> str:
        names = ", ".join(Path(str(error.filename)).name for error in self.errors)
        return f"{names} cannot be written ({self.errors[0].strerror})"


def _node_rows(built: Built, observer: RunObserver, outcome: Outcome) -> Iterator[tuple[Any, ...]]:
    """node, role, device, num_examples, busy_s, idle_s, sent, received, joules, metric, loss, energy"""
    all_sent, all_received = outcome.traffic.sent_bytes, outcome.traffic.received_bytes
    measured_j = observer.measured_j
    for i, spec in enumerate(built.plan.nodes):
        busy_s = float(outcome.busy_s.get(i, 0.0))
        sent, received = all_sent.get(i, 0), all_received.get(i, 0)
        final = observer.final_models.get(i)
        joules = node_joules(spec.profile, outcome.time_s, busy_s, sent + received)
        energy = None if joules is None else "modelled"
        if i in measured_j:
            joules, energy = measured_j[i], "measured"
        yield (
            i,
            spec.role,
            spec.profile.name,
            0 if spec.data is None else len(spec.data),
            busy_s,
            max(outcome.time_s - busy_s / spec.profile.lanes, 0.0),
            sent,
            received,
            joules,
            None if final is None else value_of(final, built.metric),
            None if final is None else final.loss,
            energy,
        )


def _partition_rows(built: Built) -> Iterator[tuple[int, int, int]]:
    """node, class, count of training examples; class -1 where the data has no classes."""
    first = len(built.plan.nodes) - len(built.parts)
    if built.dataset.task != "classification":
        yield from ((first + k, -1, len(part)) for k, part in enumerate(built.parts))
        return
    counts = label_table(built.parts, built.dataset.num_classes)
    yield from ((first + int(k), int(c), int(counts[k, c])) for k, c in np.argwhere(counts))
