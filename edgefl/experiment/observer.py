"""The observer of a run: evaluates what programs publish, and keeps the run's records. Never charged.

Nothing here depends on the wall clock: the same run leaves the same records, byte for byte.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from edgefl.data import Batch
from edgefl.devices.energy import Meter
from edgefl.errors import RunError
from edgefl.experiment.build import Built
from edgefl.experiment.energy import node_joules, total
from edgefl.experiment.pace import reached
from edgefl.experiment.tables import RISING
from edgefl.keyed import generator
from edgefl.learning.work import Evaluate, Evaluation
from edgefl.network import MeasuredLink
from edgefl.nodes.plan import RunPlan
from edgefl.nodes.traffic import Traffic
from edgefl.parameters import Vector, WeightedMean
from edgefl.runtimes.outcome import Outcome

MOST_SPANS = 1_000_000
"""Spans kept in memory; more are counted and left out."""
Row = tuple[Any, ...]
TICKS_S = 1.0
"""Seconds between ticks where several processes run and evaluate.every_s is not given."""
JOINT = -1
"""Stands for a node where one model is evaluated that is no single node's."""

_STATE = (
    "_models", "_steps", "_parts", "_part_steps", "paces", "_seen", "_num_marked", "_marked", "_fresh",
    "time_to_target_s", "evaluations", "costs", "metrics", "spans", "events", "num_spans_left_out",
)  # fmt: skip


class RunObserver:
    """Watches one run, or the nodes of it that one process hosts.

    evaluations: (time_s, node or -1, step, metric, loss). costs: (time_s, source, payload bytes, joules or
    None) so far at each evaluation; source: the first node of the process that knows, -1 for the whole run.
    metrics: (time_s, node, name, value). spans: (node, kind, start_s, end_s, detail).
    events: (time_s, kind, node, detail).
    """

    def __init__(
        self,
        built: Built,
        report: Callable[..., None] = lambda *_: None,
        *,
        hosted: Collection[int] | None = None,
        keep_events: bool = True,
    ) -> None:
        self._built, self._report, self._keep_events = built, report, keep_events
        plan, settings = built.plan, built.experiment.evaluate
        everybody = range(len(plan.nodes))
        self.hosted = tuple(everybody if hosted is None else sorted(hosted))
        self._alone = len(self.hosted) == len(everybody)
        self._source = JOINT if self._alone else self.hosted[0]
        # Processes tell what they cost at common times: without ticks there would be none.
        self.every_s = settings.every_s or (None if self._alone else TICKS_S)
        self._every_rounds = settings.every_rounds or (1 if settings.every_s is None else None)
        ends = _publishers(plan)
        self._chosen = _choose(plan, ends, settings.max_nodes)
        self._test = Batch(built.dataset.x_test, built.dataset.y_test)
        initial = built.learner.model.init()
        self._models: dict[int, Vector] = {i: initial for i in self.hosted if i in ends}
        self._steps: dict[int, int] = dict.fromkeys(self._models, 0)
        self._parts: dict[str, Vector] = {}
        """The newest parts of one model, by name; the newest last."""
        self._part_steps: dict[str, int] = {}
        self._seen: dict[int, tuple[Vector, Evaluation]] = {}
        self.paces: dict[int, tuple[float, int]] = {}
        """When each node reached the last step that it published, and which."""
        self.links: dict[int, dict[str, Any]] = {}
        """The way to the lead as a node's process measured it when it joined."""
        self._num_marked, self._marked = 0, dict[int, int]()
        self._fresh = True
        self._busy_s: defaultdict[int, float] = defaultdict(float)
        self._traffic = Traffic()
        self.time_to_target_s: float | None = None
        self.evaluations: list[Row] = []
        self.costs: list[Row] = []
        self.metrics: list[Row] = []
        self.spans: list[Row] = []
        self.events: list[Row] = []
        self.num_spans_left_out = 0
        self.meter: Meter | None = None
        """Measures this machine, where that is the one node's that this process hosts."""
        self._metered = self.hosted[0]
        self._measured_j: dict[int, float] = {}
        self.final_models: dict[int, Evaluation] = {}
        """What each model evaluated at the end came to, by node or -1."""

    # --- what a runtime calls ----------------------------------------------------------------------

    def begin(self, traffic: Traffic) -> None:
        """A run begins: everybody's model is the initial one."""
        self._traffic = traffic
        self._evaluate(0.0)

    def published(self, node: int, time_s: float, step: int, parameters: Vector, part: str | None) -> bool:
        """A program published. Returns True to stop the run."""
        if part is not None:
            self._take_part(part, step, parameters)
        elif node not in self._models:
            return False
        self._fresh = True
        self._models[node], self._steps[node] = parameters, step
        reached(self.paces, node, time_s, step)
        self._report(time_s, step)
        every = self._every_rounds
        source = node if part is None else JOINT
        if every is None or step % every or step <= self._marked.get(source, 0):
            return False
        if part is not None and self._step < step:
            return False  # other parts of the model are not so far
        # With models of their own, nodes reach a round at different times: a row per as many as there are.
        self._marked[source] = step
        self._num_marked += 1
        if part is None and self._num_marked < len(self._models):
            return False
        self._num_marked = 0
        return self._evaluate(time_s)

    def _take_part(self, name: str, step: int, parameters: Vector) -> None:
        """A part of the model takes the place of all that it covers: parts may be cut anew."""
        self._parts.pop(name, None)
        self._parts[name], self._part_steps[name] = parameters, step
        newest = {tensor: part for part, vector in self._parts.items() for tensor in vector.named()}
        self._parts = {part: self._parts[part] for part in self._parts if part in set(newest.values())}
        self._part_steps = {part: self._part_steps[part] for part in self._parts}

    @property
    def _step(self) -> int:
        """The step of the models together: of a model in parts, that of its oldest."""
        if self._part_steps:
            return min(self._part_steps.values())
        return _floor_mean(list(self._steps.values()))

    def tick(self, time_s: float) -> bool:
        """`every_s` has passed; time_s is a multiple of it. Returns True to stop the run."""
        return self._evaluate(time_s)

    def recorded(self, node: int, time_s: float, metrics: Mapping[str, float]) -> None:
        self.metrics += [(time_s, node, name, float(value)) for name, value in metrics.items()]

    def span(self, node: int, kind: str, start_s: float, end_s: float, detail: str) -> None:
        if kind == "compute":
            self._busy_s[node] += end_s - start_s
        if not self._keep_events:
            return
        if len(self.spans) < MOST_SPANS:
            self.spans.append((node, kind, start_s, end_s, detail))
        else:
            self.num_spans_left_out += 1

    def measured(self, nodes: Sequence[int], link: MeasuredLink) -> None:
        """The process of these nodes has measured its way to the lead."""
        self.links |= {node: link.as_dict() for node in nodes}

    def event(self, time_s: float, kind: str, node: int, detail: str) -> None:
        if self._keep_events:
            self.events.append((time_s, kind, node, detail))

    # --- evaluation ----------------------------------------------------------------------------------

    def _evaluate(self, time_s: float) -> bool:
        """Evaluate the models as they are now; a row for each. Returns True to stop the run."""
        self._forget(time_s)
        found = self._measured(self._candidates())
        self._fresh = False
        step = self._step
        for node, evaluation in found.items():
            own = step if node == JOINT else self._steps[node]
            self.evaluations.append((time_s, node, own, self._value(evaluation), evaluation.loss))
        self.costs.append((time_s, self._source, self._traffic.payload_bytes, self._joules(time_s)))
        if not found:
            return False
        _, mean, _ = spread([self._value(e) for e in found.values()], self._built.metric)
        self._report(time_s, step, mean)
        target = self._built.experiment.stop.target
        if target is None or not target.reached(self._built.metric, mean):
            return False
        if self.time_to_target_s is None:
            self.time_to_target_s = time_s
        return target.stop and (self._alone or self._built.plan.method.evaluates == "server")

    def _forget(self, time_s: float) -> None:
        """Drop what was found earlier at this very instant: the last look at it counts."""
        for rows in (self.costs, self.evaluations):
            while rows and rows[-1][0] == time_s:
                rows.pop()

    def _candidates(self) -> dict[int, Vector]:
        """The models to evaluate, by node, or one under JOINT."""
        evaluates = self._built.plan.method.evaluates
        # The mean model is in no process of several: there, each one's own model stands for it.
        if evaluates == "server" or evaluates == "each" or (evaluates == "mean" and not self._alone):
            return {i: model for i, model in self._models.items() if i in self._chosen}
        if evaluates == "parts" and not self._alone and (self._parts or 0 not in self.hosted):
            return {}  # over several processes the parts of a model meet only at the end
        joint = self.joint_model()
        if evaluates == "personal" and joint is not None:
            # Over several processes a client's part and the server's meet only at the end.
            parts = {i: part for i, part in self._models.items() if i != 0 and i in self._chosen}
            return {i: self._overlaid(joint, [part]) for i, part in parts.items()}
        return {} if joint is None else {JOINT: joint}

    def joint_model(self) -> Vector | None:
        """The run's one model: the server's, the nodes' mean, or the parts joined; None without any."""
        if not self._models:
            return None
        evaluates = self._built.plan.method.evaluates
        if evaluates == "parts":
            return self._overlaid(self._built.learner.model.init(), list(self._parts.values()))
        if evaluates == "personal":
            return self._models.get(0)
        models = list(self._models.values())
        mean = WeightedMean(models[0].layout)
        for model in models:
            mean.add(model)
        return mean.value(otherwise=models[0])

    def _overlaid(self, whole: Vector, parts: Sequence[Vector]) -> Vector:
        """A model with each part in its place, by the names of its tensors."""
        layout = whole.layout
        values, buffers = whole.values.clone(), list(whole.buffers)
        places = {spec.name: k for k, spec in enumerate(layout.buffers)}
        for part in parts:
            for name, tensor in part.named().items():
                if name in places:
                    buffers[places[name]] = tensor
                else:
                    values[layout.slice(name)] = tensor.reshape(-1)
        return Vector(layout, values, tuple(buffers))

    def _measured(self, models: Mapping[int, Vector]) -> dict[int, Evaluation]:
        """Evaluate models on the test set; a model that has not changed since is not evaluated again."""
        known = {id(vector): (vector, evaluation) for vector, evaluation in self._seen.values()}
        new = {id(vector): vector for vector in models.values() if id(vector) not in known}
        results = self._built.executor.run([Evaluate(vector, self._test) for vector in new.values()])
        for vector, result in zip(new.values(), results, strict=True):
            if not isinstance(result, Evaluation):
                raise RunError(f"an evaluation failed: {result}") from (
                    result if isinstance(result, Exception) else None
                )
            known[id(vector)] = (vector, result)
        self._seen = {node: known[id(vector)] for node, vector in models.items()}
        return {node: evaluation for node, (_, evaluation) in self._seen.items()}

    def _value(self, evaluation: Evaluation) -> float:
        return value_of(evaluation, self._built.metric)

    def _joules(self, time_s: float) -> float | None:
        nodes, traffic = self._built.plan.nodes, self._traffic
        return total(
            node_joules(nodes[i].profile, time_s, self._busy_s[i], traffic.node_bytes(i)) for i in self.hosted
        )

    # --- the end ---------------------------------------------------------------------------------------

    def final(self, outcome: Outcome) -> None:
        """Evaluate the end of the run, with what other processes' nodes published last."""
        ends = _publishers(self._built.plan)
        parts = [(self._part_steps[name], name, part) for name, part in self._parts.items()]
        for node, (time_s, step, parameters) in sorted(outcome.last_models.items()):
            if node in ends:
                reached(self.paces, node, time_s, step)
                self._models[node], self._steps[node], self._fresh = parameters, step, True
                parts.append((step, f"of node {node}", parameters))
        if self._built.plan.method.evaluates == "parts":
            for step, name, part in sorted(parts, key=lambda found: found[0]):
                self._take_part(name, step, part)
        self._models = dict(sorted(self._models.items()))
        whole, self._alone, self._source = self._alone, True, JOINT
        self.hosted = tuple(range(len(self._built.plan.nodes)))
        self._busy_s.update(outcome.busy_s)
        if self._fresh or not whole:
            self._evaluate(outcome.time_s)
        self.final_models = {node: evaluation for node, (_, evaluation) in self._seen.items()}

    @property
    def evaluated(self) -> dict[int, Vector]:
        """The models that were evaluated last, by node or -1."""
        return {node: vector for node, (vector, _) in self._seen.items()}

    @property
    def curve(self) -> list[Row]:
        """(time_s, step, value, loss, worst_tenth, best, payload_bytes, joules), a row per evaluation.

        value, loss: means over the nodes evaluated last; worst_tenth: the mean of their worst tenth.
        """
        by_time: defaultdict[float, list[Row]] = defaultdict(list)
        for row in self.evaluations:
            by_time[row[0]].append(row)
        costs_by_time: defaultdict[float, list[Row]] = defaultdict(list)
        for row in self.costs:
            costs_by_time[row[0]].append(row)
        latest: dict[int, Row] = {}
        costs: dict[int, Row] = {}
        curve = []
        for time_s in sorted(costs_by_time):
            _take(costs, costs_by_time[time_s])
            _take(latest, by_time[time_s])
            if by_time[time_s]:
                rows = [latest[node] for node in sorted(latest)]
                worst_tenth, mean, best = spread([row[3] for row in rows], self._built.metric)
                step, loss = (
                    _floor_mean([row[2] for row in rows]),
                    math.fsum(row[4] for row in rows) / len(rows),
                )
                payload_bytes = sum(row[2] for row in costs.values())
                joules = total(row[3] for row in costs.values())
                curve.append((time_s, step, mean, loss, worst_tenth, best, payload_bytes, joules))
        return curve

    # --- checkpoints -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that this observer knows, for a checkpoint."""
        return {name: getattr(self, name) for name in _STATE} | {"_busy_s": dict(self._busy_s)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Know what the observer of a checkpoint knew."""
        for name in _STATE:
            setattr(self, name, state[name])
        self._busy_s.update(state["_busy_s"])

    # --- several processes -------------------------------------------------------------------------------

    def export(self) -> dict[str, Any]:
        """This process's records, as JSON can hold them."""
        names = ("evaluations", "costs", "metrics", "spans", "events", "num_spans_left_out")
        measured = {str(node): joules for node, joules in self.measured_j.items()}
        rows = {name: getattr(self, name) for name in names}
        return rows | {
            "measured_j": measured,
            "links": {str(node): link for node, link in self.links.items()},
        }

    @property
    def measured_j(self) -> dict[int, float]:
        """Joules of nodes whose machine measures them, so far."""
        own = None if self.meter is None else self.meter.joules
        if own is None:
            return self._measured_j
        earlier = self._measured_j.get(self._metered, 0.0)  # of this process's earlier lives
        return {**self._measured_j, self._metered: earlier + own}

    def resume(self, records: Mapping[str, Any], busy_s: Mapping[int, float]) -> None:
        """Know what this process's observer knew in an earlier life. busy_s: so far, by node."""
        for name in ("evaluations", "costs", "metrics", "spans", "events"):
            setattr(self, name, [])
        self.num_spans_left_out = 0
        self.merge(records)
        self._busy_s.update(busy_s)

    def merge(self, records: Mapping[str, Any]) -> None:
        """Take in the records of the nodes that another process hosts."""
        for name in ("evaluations", "costs", "metrics", "events"):
            mine: list[Row] = getattr(self, name)
            mine += [tuple(row) for row in records[name]]
            mine.sort(key=lambda row: row[0])
        self.spans += [tuple(row) for row in records["spans"]]
        self.num_spans_left_out += records["num_spans_left_out"]
        self.links |= {int(node): link for node, link in records.get("links", {}).items()}
        self._measured_j |= {int(node): float(j) for node, j in records.get("measured_j", {}).items()}
        self.time_to_target_s = self._first_reached()

    def _first_reached(self) -> float | None:
        target = self._built.experiment.stop.target
        if target is None:
            return None
        times = (row[0] for row in self.curve if target.reached(self._built.metric, row[2]))
        return next(times, None)


def value_of(evaluation: Evaluation, metric: str) -> float:
    """A metric, or the loss, of an evaluation."""
    return evaluation.loss if metric == "loss" else evaluation.metrics[metric]


def spread(values: Sequence[float], metric: str) -> tuple[float, float, float]:
    """(mean of the worst tenth, mean, best) of a metric over nodes.

    >>> spread([0.5, 0.9], "accuracy")
    (0.5, 0.7, 0.9)
    """
    best_first = sorted(values, reverse=metric in RISING)
    worst = best_first[-max(1, len(values) // 10) :]
    return math.fsum(worst) / len(worst), math.fsum(values) / len(values), best_first[0]


def _publishers(plan: RunPlan) -> set[int]:
    """The nodes whose models count."""
    if plan.method.evaluates == "server":
        return {0}
    if plan.method.evaluates in ("parts", "personal"):
        return set(range(len(plan.nodes)))
    return {i for role in plan.method.ends_with for i in plan.ids(role)}


def _floor_mean(steps: Sequence[int]) -> int:
    return sum(steps) // len(steps) if steps else 0


def _take(known: dict[int, Row], rows: Sequence[Row]) -> None:
    """Let each row replace its node's earlier one; one that stands for all replaces all, and the reverse."""
    for row in rows:
        if row[1] == JOINT or JOINT in known:
            known.clear()
        known[row[1]] = row


def _choose(plan: RunPlan, nodes: set[int], most: int | None) -> set[int]:
    """The nodes whose own models are evaluated."""
    if most is None or most >= len(nodes) or plan.method.evaluates not in ("each", "personal"):
        return nodes
    rng = generator(plan.seed, "evaluated nodes")
    return {int(i) for i in rng.choice(sorted(nodes), most, replace=False)}
