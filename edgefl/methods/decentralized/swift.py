"""SWIFT (Bornstein, Rabbani, Wang, Bedi, Huang 2023, Algorithm 1, https://arxiv.org/abs/2210.14026).

Client i keeps a copy S_i[j] of each neighbor's model and waits for nobody. Step c: start sending x_i to all
neighbors; G = mini-batch gradient at x_i; in the communication set C_s (every (s+1)-th step) take in what
has arrived and h = a_ii x_i + sum_j a_ij S_i[j], else h = x_i; x_i <- h - eta G ([train]). The gradient is
taken before averaging, and only client i ever writes x_i. The weights a_ij make the expected mixing matrix,
client i active with probability p_i (its influence score), symmetric and doubly stochastic: single events
move the mean, their expectation does not. sum_i p_i f_i is what is minimised.

Choices. Weights "balanced" (patterns/influence.py) for any graph and scores; "largest_first" is the
authors' code, refused where it fails. p_i goes by the planned time of a step, is uniform as in their
experiments, or is counted from the steps that models carry. A send to a neighbor is left out while the last
one to it has not left: nothing queues. A neighbor that is gone loses its edge at both ends, its weight goes
to the client itself, and its copy is dropped; the edge returns with its first new model. Buffers are
averaged like parameters, integer counters stay each client's own. At the end the final model is sent again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.learning.cost import Cost
from edgefl.learning.optimizer import State
from edgefl.learning.work import Call, Gradient, GradientResult
from edgefl.nodes import Back, Faults, Gone, Message, Method, MethodConfig, Node, Task, Transfer
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector, mix
from edgefl.patterns.influence import balanced_row, largest_first_rows
from edgefl.patterns.reports import ALL_FINITE

MOST_SCALING = 4.0
"""Largest factor that equal_objective puts on a step."""


class SwiftConfig(MethodConfig):
    """When and with which weights to average; the gradient and the optimiser are [train]'s."""

    local_steps_between: int = Field(default=0, ge=0)
    """s of the communication set C_s: steps without averaging between two with it."""
    send_every_step: bool = True
    """Send the model at every step; off: only at the steps that end with averaging, s + 1 times fewer."""
    weights: Literal["balanced", "largest_first"] = "balanced"
    """How a_ij follows from degrees and scores."""
    scores: Literal["planned", "uniform", "counted"] = "planned"
    """p_i: by the planned seconds of a step, equal for all, or from the counts that models carry."""
    store: Literal["copies", "arrived"] = "copies"
    """Keep a copy of each neighbor's model; or average only over what arrived since the last averaging."""
    weight_boost: bool = False
    """With store "arrived": divide the weights by (arrived + 1) / (degree + 1), in place of giving the
    weight of those missing to the client itself."""
    equal_objective: bool = False
    """Scale client i's step by 1 / (n p_i), at most 4: all clients count the same, however fast. Running
    statistics, which are no step, are not scaled."""


@dataclass(frozen=True)
class Model(Message):
    """The sender's model after `step` steps, sent at `sent_s` seconds."""

    newest_by = ("sender",)
    step: int
    sent_s: float
    parameters: Vector


async def client(node: Node) -> Vector:
    assert node.data is not None
    config: SwiftConfig = node.config
    period = config.local_steps_between + 1
    x, state, made, copies, lives = _begin(node)
    scale = _step_scale(node)
    sending: dict[int, Task[None]] = {}  # neighbors whose last model has not left yet
    for k in node.rounds(made):
        skipped = 0
        averages = (k + 1) % period == 0
        if averages or config.send_every_step:
            skipped = len(sending)
            message = Model(k, node.now(), x)
            for j in node.fleet.neighbors:
                if j not in sending:
                    sending[j] = node.start(_leaving(node.send(j, message)))
        r: GradientResult = await node.compute(Gradient(x, node.data, k, node.workload))
        if averages:
            _take_in(node, copies, lives)
            ages = [node.now() - m.sent_s for m in copies.values()]
            x = await _averaged(node, x, copies, k)
            if ages:
                node.record(copy_age_s=sum(ages) / len(ages))
            if config.store == "arrived":
                copies.clear()
        stepped, state = node.optimizer.step(x, r.gradient, state, k)
        x = stepped if scale == 1 else stepped.with_values(x.values + (stepped.values - x.values) * scale)
        made = k + 1
        node.record(train_loss=r.loss, skipped_sends=skipped)
        node.publish(x, step=made)
        sending = {j: task for j, task in sending.items() if not task.done}
        await node.save(x=x, state=state, step=made, copies=_kept(copies), lives=list(lives.items()))
    node.send(node.fleet.neighbors, Model(made, node.now(), x))
    return x


def _begin(node: Node) -> tuple[Vector, State | None, int, dict[int, Model], dict[int, int]]:
    """x_i, the optimiser's state, steps made, copies, neighbors' lives: a common start, or what was saved."""
    if node.saved is None:
        x = node.model.init()
        everybody = node.fleet.neighbors if node.config.store == "copies" else ()
        return x, node.optimizer.init(x.layout), 0, dict.fromkeys(everybody, Model(0, 0.0, x)), {}
    s = node.saved
    copies = {j: Model(step, sent_s, parameters) for j, step, sent_s, parameters in s["copies"]}
    return s["x"], s["state"], s["step"], copies, dict(s["lives"])


def _kept(copies: Mapping[int, Model]) -> list[tuple[int, int, float, Vector]]:
    return [(j, m.step, m.sent_s, m.parameters) for j, m in copies.items()]


async def _leaving(transfer: Transfer) -> None:
    await transfer


def _take_in(node: Node, copies: dict[int, Model], lives: dict[int, int]) -> None:
    """Replace copies by the newest models that have arrived; those of neighbors that went are dropped."""
    for event in node.take(Gone, Back):
        copies.pop(event.sender, None)
        lives[event.sender] = max(event.life, lives.get(event.sender, 0))
    for m in node.take(Model):
        if m.life >= lives.get(m.sender, 0) and node.fleet.alive(m.sender):
            copies[m.sender] = m


async def _averaged(node: Node, x: Vector, copies: Mapping[int, Model], k: int) -> Vector:
    """a_ii x_i + sum_j a_ij S_i[j]; charged as the (degree + 2) models that are read and written."""
    if not copies:
        return x
    models = {node.id: x} | {j: m.parameters for j, m in copies.items()}
    cost = Cost(traffic_bytes=(len(models) + 1) * x.nbytes)
    work = Call(mixed, (node.id, models, _row(node, copies, k)), cost)
    return await node.compute(work)  # type: ignore[no-any-return]


def mixed(own: int, models: Mapping[int, Vector], row: Mapping[int, float]) -> Vector:
    """sum_j row[j] models[j], with the integer counters of the client `own`."""
    mean, x = mix(models, row), models[own]
    pairs = zip(mean.buffers, x.buffers, strict=True)
    return Vector(x.layout, mean.values, tuple(m if m.is_floating_point() else b for m, b in pairs))


def _row(node: Node, copies: Mapping[int, Model], k: int) -> dict[int, float]:
    """The weights of the client and of those of whom it has a model; they sum to 1."""
    config: SwiftConfig = node.config
    topology = node.fleet.topology
    if config.weights == "largest_first":
        full = largest_first_rows(topology)[node.id]
    else:
        full = balanced_row(topology, node.id, lambda j: _score(node, copies, k, j))
    row = {j: a for j, a in full.items() if j == node.id or j in copies}
    if config.weight_boost:
        return dict.fromkeys(row, 1 / len(row))  # equal weights 1/(degree + 1), boosted by those who came
    for j in full.keys() - row.keys():
        row[node.id] += full[j]
    return row


def _score(node: Node, copies: Mapping[int, Model], k: int, j: int) -> float:
    """p_j to a common factor; a neighbor without a model has no weight, whatever it is."""
    if node.config.scores == "planned":
        return 1 / node.fleet.step_s(j)
    if node.config.scores == "counted" and j != node.id:
        return (copies[j].step + 1) / (k + 1) if j in copies else 1.0
    return 1.0


def _step_scale(node: Node) -> float:
    """1 / (n p_i), at most MOST_SCALING; 1 unless equal_objective is on."""
    if not node.config.equal_objective or node.config.scores == "uniform":
        return 1.0
    speeds = {j: 1 / node.fleet.step_s(j) for j in node.fleet.ids()}
    return min(MOST_SCALING, sum(speeds.values()) / len(speeds) / speeds[node.id])


def _refuse_impossible(plan: RunPlan) -> None:
    config: SwiftConfig = plan.config
    topology = plan.network.topology
    if config.weights == "largest_first":
        if config.scores != "uniform":
            raise ConfigError("method.swift.scores", config.scores, '"uniform" with weights "largest_first"')
        _refuse_unsafe(plan)
    if config.equal_objective and config.scores == "counted":
        raise ConfigError("method.swift.equal_objective", True, 'scores "planned": no counts are known ahead')
    if config.weight_boost and config.store == "copies":
        raise ConfigError("method.swift.weight_boost", True, 'store "arrived" goes with it')
    if config.weight_boost and not (topology.is_regular and config.scores == "uniform"):
        accepted = 'equal weights: scores "uniform" and a regular topology'
        raise ConfigError("method.swift.weight_boost", True, accepted)


def _refuse_unsafe(plan: RunPlan) -> None:
    """Refuse graphs on which largest_first's expected matrix is no average."""
    rows = largest_first_rows(plan.network.topology)
    for i, row in enumerate(rows):
        if row[i] <= 0:
            found = f'"balanced" on this graph: node {i} would keep {row[i]:.3g} of itself'
            raise ConfigError("method.swift.weights", "largest_first", found)
        for j, a in row.items():
            if abs(a - rows[j][i]) > 1e-12:
                found = f'"balanced" on this graph: edge {i}-{j} would weigh {a:.3g} and {rows[j][i]:.3g}'
                raise ConfigError("method.swift.weights", "largest_first", found)


METHOD = Method(
    name="swift",
    title="Wait-free model communication",
    paper="Bornstein, Rabbani, Wang, Bedi, Huang 2023, https://arxiv.org/abs/2210.14026",
    roles={"client": client},
    messages=(Model,),
    config=SwiftConfig,
    ends_with=("client",),
    needs="connected",
    evaluates="mean",
    prepare=_refuse_impossible,
    tolerates=Faults(crashes=True, returns=True, partitions=True, silence=True),
    invariants=(ALL_FINITE,),
)
