"""AsyncDrop (Dun et al. 2023, https://arxiv.org/abs/2210.16105; https://github.com/dunchen/AsyncDrop__Release).

W: parameters; p: fraction of each layer's units that a client does not get; r: a client's speed rank, 0 the
fastest of R; alpha: share of an update. A client is given the rows and columns of W that its mask leaves,
trains that smaller model and sends it back; on arrival W_e <- (1 - alpha) W_e + alpha W'_e where the mask has
e, all else stays. masks = "ranked": a layer's n units are ordered by how far their weights are from W_ref,
furthest first, and rank r goes without those at places s, ..., s + floor(p n) - 1, s = r floor(n / R), the
last ones where that overruns. "random": it goes without any floor(p n), drawn at each exchange.
Choices: one client per rank, ranks by planned seconds per step, ties by id; ties of units to the lower
index. The mask is explicit, where the code tests |W' - W| > 1e-9. The rate is [train]'s; the code's decay is
an option, by the clock when a client begins. Residual networks lose inner channels of their blocks, the first
stage none; other models units of every hidden layer. The server loop, staleness and faults are FedAsync's; an
update whose mask is not known any more is refused. [compress] packs a sub-model's change; what it left out
of a unit waits until a mask has that unit again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from edgefl.errors import ConfigError
from edgefl.learning import Model, SubModel, Workload
from edgefl.learning.narrowing import unit_scores
from edgefl.learning.work import LocalSGD, Trained
from edgefl.methods.federated.fedasync import Mix, serve
from edgefl.nodes import Faults, Message, Method, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.parameters.compress import Packed
from edgefl.patterns.asynchronous import StalenessConfig
from edgefl.patterns.compression import Uplink, bare
from edgefl.patterns.reports import FINITE, Intake, answers


class AsyncDropConfig(StalenessConfig):
    """p, alpha, the masks; the local training is [train]'s."""

    drop_fraction: float = Field(default=0.25, ge=0, lt=1)
    """p: share of each layer's units that a client does not get."""
    masks: Literal["ranked", "random"] = "ranked"
    """By speed and by how far units have moved, or uniform anew at each exchange."""
    reference: Literal["initial", "previous"] = "initial"
    """W_ref, from which moves are measured: the first model, or the one before the last merge."""
    mixing_weight: float = Field(default=0.5, gt=0, le=1)
    """alpha: share of an update in the new model."""
    staleness: Literal["constant", "polynomial", "hinge"] = "constant"
    """s(u): AsyncDrop has none; the others are FedAsync's."""
    rate_decay_at: tuple[float, ...] = ()
    """Shares of [stop] time_s, at each of which the rate falls to a tenth; the authors' code: 0.5, 0.75."""


@dataclass(frozen=True)
class Narrowed(Message):
    """kept: int16 indices of the units in it, layer by layer; values: its parameters; turn and counted as in
    FedAsync."""

    newest_by = ("sender",)
    version: int
    kept: Tensor
    values: Tensor
    turn: int
    counted: int


@dataclass(frozen=True)
class Trimmed(Message):
    """What became of the sub-model of that life of the server and that turn, which name its mask; packed: its
    change."""

    once_by = ("sender", "life", "given", "turn")
    given: int
    version: int
    turn: int
    values: Tensor | Packed
    loss: float


def droppable(model: Model) -> dict[str, int]:
    """The layers that may lose units, and how many they have."""
    units = model.narrowing.units
    branches = [u for u in units if u.beside is not None]
    chosen = [u for u in branches if u.beside != branches[0].beside] if branches else units
    return {u.name: u.count for u in chosen}


def num_dropped(n: int, p: float) -> int:
    """floor(p n), safe against the rounding of p."""
    return math.floor(p * n + 1e-9)


def window(scores: Tensor, rank: int, num_ranks: int, p: float) -> Tensor:
    """The units that a rank goes without. scores (n,): how far each has moved."""
    n = len(scores)
    count = num_dropped(n, p)
    start = min(rank * (n // num_ranks), n - count)
    return scores.argsort(descending=True, stable=True)[start : start + count]


def sub_model(model: Model, kept: Tensor, p: float) -> SubModel:
    """The sub-model that a message's indices name."""
    layers = droppable(model)
    parts = torch.split(kept, [n - num_dropped(n, p) for n in layers.values()])
    return model.narrow({name: part.tolist() for name, part in zip(layers, parts, strict=True)})


class Drop(Mix):
    """Makes masks, remembers those that are out, and puts what comes back where it belongs."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.config, node.config.mixing_weight)
        self._node = node
        self._drop: AsyncDropConfig = node.config
        clients = sorted(node.fleet.ids("client"), key=lambda k: (node.fleet.step_s(k), k))
        self._ranks = {k: r for r, k in enumerate(clients)}
        saved: Mapping[str, Any] = (node.saved or {}).get("merge") or {}
        self._reference: Vector = saved.get("reference") or node.model.init()
        self._out: dict[int, tuple[int, int, Tensor]] = dict(saved.get("out", {}))

    def offer(self, x: Vector, t: int, k: int, turn: int, counted: int) -> Message:
        kept = self._mask(x, k, turn)
        self._out[k] = (self._node.life, turn, kept)
        part = sub_model(self._node.model, kept, self._drop.drop_fraction).extract(x)
        return Narrowed(t, kept, part.values, turn, counted)

    def _mask(self, x: Vector, k: int, turn: int) -> Tensor:
        config, model, kept = self._drop, self._node.model, []
        moved = (x - self._reference).named()
        rng = self._node.rng("mask", k, turn)
        for name, n in droppable(model).items():
            if config.masks == "random":
                gone = torch.from_numpy(rng.permutation(n)[: num_dropped(n, config.drop_fraction)])
            else:
                scores = unit_scores(model.narrowing, moved, name)
                gone = window(scores, self._ranks[k], len(self._ranks), config.drop_fraction)
            stays = torch.ones(n, dtype=torch.bool)
            stays[gone] = False
            kept.append(stays.nonzero().flatten().to(torch.int16))
        return torch.cat(kept)

    def opened(self, intake: Intake, m: Any, x: Vector, start: Vector | None) -> Vector | None:
        life, turn, kept = self._out.get(m.sender, (-1, -1, torch.empty(0)))
        if (life, turn) != (m.given, m.turn):
            intake.refuse(m.sender, "its mask is not known any more")
            return None
        sub = sub_model(self._node.model, kept, self._drop.drop_fraction)
        if not isinstance(m.values, Tensor):
            return self._unpacked(intake, m, x, sub, start)
        if m.values.shape != sub.index.shape or m.values.dtype != x.values.dtype:
            intake.refuse(m.sender, "it does not fit its mask")
            return None
        return intake.model(m.sender, x.replace(sub.index, m.values), x)

    def _unpacked(
        self, intake: Intake, m: Any, x: Vector, sub: SubModel, start: Vector | None
    ) -> Vector | None:
        if start is None:
            intake.refuse(m.sender, "the model that it began from is not known any more")
            return None
        part = intake.model(m.sender, m.values, sub.extract(start))
        return None if part is None else x.replace(sub.index, part.values)

    def take(self, x: Vector, update: Vector, u: int) -> Vector:
        if self._drop.reference == "previous":
            self._reference = x
        return super().take(x, update, u)

    def state(self) -> Any:
        moves = self._drop.reference == "previous"
        return {"reference": self._reference if moves else None, "out": dict(self._out)}


async def server(node: Node) -> Vector:
    drop = Drop(node)
    return await serve(node, drop, keep_starts=node.compress.on, offer=drop.offer, kind=Trimmed)


def decayed(node: Node) -> Workload:
    """The node's workload at the rate of now."""
    shares = node.config.rate_decay_at
    num_passed = sum(node.now() >= share * (node.end_s or math.inf) for share in shares)
    if not num_passed:
        return node.workload
    return node.workload.model_copy(update={"rate_factor": node.workload.rate_factor * 0.1**num_passed})


async def client(node: Node) -> None:
    assert node.data is not None
    uplink = Uplink(node)
    while True:
        m = await node.receive(Narrowed)
        uplink.settle(m.counted)
        sub = sub_model(node.model, m.kept, node.config.drop_fraction)
        small, start = sub.model, Vector(sub.model.layout, m.values)
        r: Trained = await node.compute(LocalSGD(start, node.data, m.turn, decayed(node), model=small))
        y = bare(uplink.model(r.parameters, start, m.turn, sub.index))
        await uplink.save()
        node.send(m.sender, Trimmed(m.life, m.version, m.turn, y, r.loss))


def prepare(plan: RunPlan) -> None:
    assert plan.learner is not None
    config, model = plan.config, plan.learner.model
    shares = config.rate_decay_at
    if any(not 0 < share < 1 for share in shares):
        raise ConfigError("method.asyncdrop.rate_decay_at", shares, "shares above 0 and below 1")
    if shares and plan.time_s is None:
        raise ConfigError("method.asyncdrop.rate_decay_at", shares, "shares of stop.time_s, which is missing")
    layers = droppable(model)
    if config.drop_fraction and not layers:
        raise ConfigError("model.name", model.name, "asyncdrop needs a model with hidden units to drop")
    if max(layers.values(), default=0) > torch.iinfo(torch.int16).max:
        raise ConfigError("model.name", model.name, "asyncdrop takes layers of at most 32767 units")


METHOD = Method(
    name="asyncdrop",
    title="Asynchronous distributed dropout",
    paper="Dun et al. 2023, https://arxiv.org/abs/2210.16105",
    roles={"server": server, "client": client},
    messages=(Narrowed, Trimmed),
    config=AsyncDropConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    prepare=prepare,
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(Narrowed, Trimmed)),
    stateless=("client",),
)
