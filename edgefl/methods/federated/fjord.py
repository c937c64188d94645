"""FjORD, ordered dropout (Horvath et al. 2021, https://arxiv.org/abs/2102.13451).

w: parameters; P: widths; p-corner: the sub-model of the first ceil(p n) units of every hidden layer of n,
inputs and outputs whole, so that narrow corners lie in wide ones; p_k: client k's limit, its largest width. A
client is given the p_k-corner of w; each local step draws p uniformly from {p in P: p <= p_k} and trains that
corner.
Server: each coordinate becomes the mean over those who reported and whose p_k-corner holds it, with weights
n_k (examples); one that nobody holds stays.
Choices: limits are dealt evenly over P in order of planned seconds per step, the fastest getting the largest,
ties by id; where [assign] plans widths these are the limits. A step touches its corner alone: no decay or
momentum outside. [compress] packs a corner's change. Rounds, deadline and over-selection as in our FedAvg,
which P = {1} is.
Self-distillation (section 3.2, distillation_alpha above 0): a step that draws p < p_k goes down
CE(p_k) + (1 - alpha) CE(p) + alpha T^2 KL(p_k || p), so that the p_k-corner teaches and is itself trained.
Ours there: a step that draws p_k is a plain one (the same at alpha = 1, the paper's best); the factor T^2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from pydantic import Field
from torch import Tensor

from edgefl.data import LocalData
from edgefl.errors import ConfigError
from edgefl.learning import Learner, Model, SubModel, Workload
from edgefl.learning.ordered import OrderedSGD, Teaching
from edgefl.learning.work import Trained
from edgefl.nodes import Faults, Message, Method, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.parameters.compress import Packed
from edgefl.patterns.compression import Counted, Uplink, bare
from edgefl.patterns.reports import FINITE, Intake, answers
from edgefl.patterns.rounds import (
    Round,
    RoundConfig,
    Stop,
    refuse_void_rounds,
    somebody_alive,
    unless_stopped,
)


class FjORDConfig(RoundConfig):
    """P, and the rules of a round; the local training is [train]'s."""

    widths: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    """P: shares of every hidden layer's units, ascending."""
    distillation_alpha: float = Field(default=0.0, ge=0, le=1)
    """alpha: the teacher's share in a narrow corner's loss; 0: no self-distillation; the paper's best: 1."""
    distillation_temperature: float = Field(default=1.0, gt=0)
    """T: divides the logits of teacher and taught."""


@dataclass(frozen=True)
class Corner(Message):
    """values: the receiver's corner of w; counted: the round of its last report that counted, where
    [compress] remembers, else -1."""

    newest_by = ("sender",)
    round: int
    values: Tensor
    counted: int


@dataclass(frozen=True)
class TrainedCorner(Message):
    """What became of it; packed: the change."""

    stale_by = "round"
    once_by = ("sender", "life", "round")
    round: int
    values: Tensor | Packed
    num_examples: int
    num_steps: int
    loss: float


def corner(model: Model, width: float) -> SubModel:
    """The first ceil(p n) units of every hidden layer."""
    counts = model.narrowing.counts
    return model.narrow({name: range(math.ceil(width * n - 1e-9)) for name, n in counts.items()})


def limits(node: Node) -> dict[int, float]:
    """p_k of every client."""
    P: Sequence[float] = node.config.widths
    clients = node.fleet.ids("client")
    planned = {k: p for k in clients if (p := node.fleet.workload(k).width) is not None}
    if len(planned) == len(clients):
        return planned
    fastest_first = sorted(clients, key=lambda k: (node.fleet.step_s(k), k))
    n = len(fastest_first)
    return {k: P[-1 - i * len(P) // n] for i, k in enumerate(fastest_first)}


class CornerMean:
    """Each coordinate's weighted mean over those who hold it: `WeightedMean`, coordinate by coordinate."""

    def __init__(self, w: Vector) -> None:
        self._w, self._mean = w, w.values.clone()
        self._weight = torch.zeros(w.layout.size, dtype=torch.float64)

    def add(self, held: SubModel, values: Tensor, weight: float) -> None:
        """Take one client's corner in. weight: above 0."""
        total = self._weight[held.index] + weight
        share = (weight / total).to(values.dtype)
        self._mean[held.index] = torch.lerp(self._mean[held.index], values, share)
        self._weight[held.index] = total

    def value(self) -> Vector:
        """The means; w where nobody held anything."""
        return self._w.with_values(self._mean)


def opened(intake: Intake, w: Vector, corners: dict[int, SubModel], r: TrainedCorner) -> Tensor | None:
    """The values of a report, checked; None: refused."""
    given, sent = corners[r.sender].extract(w), r.values
    if isinstance(sent, Tensor) and (sent.shape, sent.dtype) != (given.values.shape, given.values.dtype):
        intake.refuse(r.sender, "it does not fit its corner")
    elif r.num_steps < 1:
        intake.refuse(r.sender, f"it claims {r.num_steps} local steps")
    else:
        model = given.with_values(sent) if isinstance(sent, Tensor) else sent
        found = intake.model(r.sender, model, given, r.num_examples)
        return None if found is None else found.values
    return None


async def server(node: Node) -> Vector:
    p = limits(node)
    of_width = {width: corner(node.model, width) for width in set(p.values())}
    corners = {k: of_width[p[k]] for k in p}
    saved = node.saved or {"w": node.model.init(), "round": 0, "counted": {}}
    w: Vector = saved["w"]
    counted = Counted(node, saved["counted"])
    intake = Intake(node, node.config.max_update_norm)
    for t in node.rounds(saved["round"]):
        await somebody_alive(node, tuple(p))
        S_t = Round(node, t, tuple(p), intake)
        for k in S_t.cohort:
            node.send(k, Corner(t, corners[k].extract(w).values, counted.of(k)))
        mean = CornerMean(w)
        async for r, values in S_t.reports(TrainedCorner, partial(opened, intake, w, corners)):
            mean.add(corners[r.sender], values, r.num_examples)
        if S_t.counts:
            w = mean.value()
        S_t.record()
        counted.add(S_t.counted, t)
        node.publish(w, step=t + 1)
        await node.save(w=w, round=t + 1, counted=counted.state())
    return w


async def client(node: Node) -> None:
    assert node.data is not None
    p_k = limits(node)[node.id]
    choices = [corner(node.model, p) for p in node.config.widths if p <= p_k]
    limit, uplink = choices[-1], Uplink(node)
    while True:
        m = await node.receive(Corner)
        uplink.settle(m.counted)
        given = Vector(limit.model.layout, m.values)
        num_steps = node.workload.num_steps(len(node.data))
        drawn = node.rng("width", m.round).integers(len(choices), size=num_steps)
        work = OrderedSGD(
            given, node.data, m.round, node.workload, model=limit.model, limit=limit,
            corners=tuple(choices[i] for i in drawn), teaching=teaching(node.config),
        )  # fmt: skip
        r: Trained | None = await unless_stopped(node, work, m.round)
        if r is not None:
            y = bare(uplink.model(r.parameters, given, m.round, limit.index))
            await uplink.save()
            node.send(m.sender, TrainedCorner(m.round, y, len(node.data), r.num_steps, r.loss))


def widths(config: FjORDConfig) -> tuple[float, ...]:
    """P, checked."""
    P = config.widths
    if not P or list(P) != sorted(set(P)) or not 0 < P[0] <= P[-1] <= 1:
        raise ConfigError("method.fjord.widths", P, "shares above 0 and up to 1, ascending, each once")
    return P


def costliest(config: FjORDConfig, learner: Learner, data: LocalData, workload: Workload) -> OrderedSGD:
    """A round in which every step draws the limit, or where that teaches, the widest that it can teach."""
    assert workload.width is not None
    limit, alpha = corner(learner.model, workload.width), config.distillation_alpha
    taught = [p for p in config.widths if p < workload.width] if alpha else []
    drawn = corner(learner.model, taught[-1]) if taught else limit
    return OrderedSGD(
        limit.extract(learner.model.init()), data, 0, workload, model=limit.model, limit=limit,
        corners=(drawn,) * workload.num_steps(len(data)), teaching=teaching(config),
    )  # fmt: skip


def teaching(config: FjORDConfig) -> Teaching | None:
    """How the limit teaches; None: it does not."""
    alpha = config.distillation_alpha
    return Teaching(alpha, config.distillation_temperature) if alpha else None


def prepare(plan: RunPlan) -> None:
    assert plan.learner is not None
    widths(plan.config)
    if not plan.learner.model.narrowing.units:
        raise ConfigError("model.name", plan.learner.model.name, "fjord needs a model with hidden units")
    if plan.config.distillation_alpha and plan.learner.model.task == "regression":
        key = "method.fjord.distillation_alpha"
        raise ConfigError(
            key, plan.config.distillation_alpha, "0 for regression: there are no logits to teach"
        )
    refuse_void_rounds(plan)


METHOD = Method(
    name="fjord",
    title="Ordered dropout: nested sub-models by what a device can do",
    paper="Horvath et al. 2021, https://arxiv.org/abs/2102.13451",
    roles={"server": server, "client": client},
    messages=(Corner, TrainedCorner, Stop),
    config=FjORDConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=prepare,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(Corner, TrainedCorner)),
    stateless=("client",),
    widths=widths,
    narrow_training=costliest,
)
