"""Workloads from profiles, links, model costs and data: who trains on how much, so that few wait.

A round of a device, as planned here: the model comes down, the device trains, the model goes up, each
transfer with the links to itself. `edgefl plan` shows what becomes of that when all share the links.

Policies:
uniform: [train]'s batch size and steps for all.
proportional-batch: batch sizes that let all devices end a round of [train]'s local steps together, as far as
their overheads, data and memory allow; the fleet trains on no fewer examples per step than with uniform, and
on more where they are nearly free. In local training a device's rate grows and falls with its batch (linear
scaling, Goyal et al. 2017, https://arxiv.org/abs/1706.02677).
deadline: as many local steps as fit before a common deadline, at [train]'s batch size.
width: uniform, on the widest of the sub-models that the method can train with which a round, of the costliest
steps that it may take, ends before the deadline and that fits the memory.
cluster: uniform, and the devices in groups of like speed, which methods find in node.fleet.groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from edgefl.data import LocalData
from edgefl.errors import ConfigError
from edgefl.learning.cost import Cost, duration_s
from edgefl.learning.learner import Learner
from edgefl.learning.model import Model
from edgefl.learning.work import LocalSGD
from edgefl.learning.workload import Workload
from edgefl.network import NetworkPlan
from edgefl.nodes.plan import NodeSpec, Replan

Policy = Literal["uniform", "proportional-batch", "deadline", "width", "cluster"]
NarrowTraining = Callable[[Learner, LocalData, Workload], LocalSGD]
_HALVINGS = 60
_FREE = 0.02
"""proportional-batch: what a round may be longer for examples that cost next to nothing, as a share."""
_MOST_GROWTH = 4
"""proportional-batch: how many times [train]'s batch size a device takes for that reason; far beyond it the
linear scaling rule does not hold."""
_MOST_STEPS = 1 << 20


class AssignConfig(BaseModel):
    """The [assign] table: how much of the work each device takes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    policy: Policy = "uniform"
    """uniform, proportional-batch, deadline, width or cluster."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Seconds of a round, transfers included. deadline: the slowest device's with uniform where not given;
    width: the middle device's."""
    max_steps: int | None = Field(default=None, gt=0)
    """deadline: most local steps of a device."""
    groups: int = Field(default=2, ge=1)
    """cluster: how many groups."""
    replan_above: float | None = Field(default=None, gt=0)
    """deadline, proportional-batch: a device whose local training takes this much more or less than planned,
    as a share, plans its work anew; None: the plan stands."""


@dataclass(frozen=True)
class Share:
    """One device's part. compute_s, transfer_s: of one round as planned; idle: share of the round that the
    device neither computes nor transfers."""

    workload: Workload
    compute_s: float
    transfer_s: float
    idle: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.transfer_s


@dataclass(frozen=True)
class Assignment:
    """shares: by node id, of those that hold data. round_s: the longest of them. groups: of node ids, the
    fastest first."""

    shares: Mapping[int, Share]
    round_s: float
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Fleet:
    """What is planned for. slowdowns: how many times its profile's time each node takes, by id. widths: those
    that a node may train; narrow_training: the costliest work of a round at one, as Method has both."""

    nodes: Sequence[NodeSpec]
    network: NetworkPlan
    learner: Learner
    slowdowns: Mapping[int, float]
    widths: tuple[float, ...] = ()
    narrow_training: NarrowTraining | None = None

    @classmethod
    def of(
        cls,
        nodes: Sequence[NodeSpec],
        network: NetworkPlan,
        learner: Learner,
        widths: tuple[float, ...] = (),
        narrow_training: NarrowTraining | None = None,
    ) -> Fleet:
        """The fleet of a run before it begins."""
        slowdowns = {i: node.slowdown for i, node in enumerate(nodes)}
        return cls(nodes, network, learner, slowdowns, widths, narrow_training)

    @property
    def ids(self) -> tuple[int, ...]:
        """The nodes that hold data."""
        return tuple(i for i, node in enumerate(self.nodes) if node.data is not None and len(node.data))

    def training(self, i: int, workload: Workload) -> LocalSGD:
        """A round of local training of node i, the costliest that there may be."""
        data, learner = self.nodes[i].data, self.learner
        assert data is not None
        if workload.width is not None and self.narrow_training is not None:
            return self.narrow_training(learner, data, workload)
        return LocalSGD(
            learner.model.init(), data, 0, workload, model=narrowed(learner.model, workload.width)
        )

    def cost(self, i: int, workload: Workload) -> Cost:
        """What that costs."""
        return self.training(i, workload).cost(self.learner)

    def compute_s(self, i: int, workload: Workload) -> float:
        """Seconds of that."""
        return duration_s(self.cost(i, workload), self.nodes[i].profile) * self.slowdowns[i]

    def transfer_s(self, i: int, workload: Workload | None = None) -> float:
        """Seconds of one model down and one up, alone on the links, between node i and the slowest of whom
        it talks to. workload: whose width the model has; None: whole."""
        model = None if workload is None else self.training(i, workload).model
        size = (model or self.learner.model).counts.parameter_bytes
        others = self.network.topology.neighbors(i)
        times = [
            size / self.network.rate_bytes_per_s(j, i)
            + size / self.network.rate_bytes_per_s(i, j)
            + 2 * self.network.latency_s(i, j)
            for j in others
        ]
        return max(times, default=0.0)

    def fits(self, i: int, workload: Workload) -> bool:
        return self.cost(i, workload).memory_bytes <= self.nodes[i].profile.memory_bytes


def assign(fleet: Fleet, config: AssignConfig) -> Assignment:
    """Workloads for all nodes that hold data. Raises ConfigError for what the policy cannot do."""
    ids = fleet.ids
    uniform = {i: fleet.nodes[i].workload for i in ids}
    if config.policy == "proportional-batch":
        workloads = _proportional_batches(fleet, uniform)
    elif config.policy == "deadline":
        workloads = _steps_that_fit(fleet, uniform, config)
    elif config.policy == "width":
        workloads = _widths_that_fit(fleet, uniform, config)
    else:
        workloads = uniform
    num_groups = min(config.groups, len(ids)) if config.policy == "cluster" else 1
    return _planned(fleet, workloads, _groups(fleet, uniform, num_groups))


def assigned(nodes: Sequence[NodeSpec], assignment: Assignment) -> tuple[NodeSpec, ...]:
    """The nodes with their workloads; those without data as they are."""
    shares = assignment.shares
    return tuple(
        replace(node, workload=shares[i].workload) if i in shares else node for i, node in enumerate(nodes)
    )


def replanner(fleet: Fleet, config: AssignConfig, planned: Assignment) -> Replan | None:
    """What a device goes by once its training takes another time than planned; None without replan_above.

    A device that is off by more than that share takes how fast it was for granted, and plans the work that
    fills its planned time. Where not even batches of one would fit, the batch stays.
    Raises ConfigError for a policy that plans no time.
    """
    if config.replan_above is None:
        return None
    if config.policy not in ("deadline", "proportional-batch"):
        accepted = f"policy deadline or proportional-batch, which plan a time; {config.policy} does not"
        raise ConfigError("assign.replan_above", config.replan_above, accepted)
    drift = config.replan_above

    def replan(i: int, workload: Workload, seconds: float) -> Workload | None:
        share = planned.shares[i]
        if abs(seconds / share.compute_s - 1) <= drift:
            return None
        factor = seconds / fleet.compute_s(i, workload)
        found = replace(fleet, slowdowns={**fleet.slowdowns, i: fleet.slowdowns[i] * factor})
        within_s = share.compute_s * (1 + 1e-9)
        if config.policy == "deadline":
            new = workload.model_copy(
                update={"steps": _most_steps(found, i, workload, config.max_steps or _MOST_STEPS, within_s)}
            )
        elif _compute_of_batch(found, i, workload, 1) > within_s:
            return None
        else:
            was = share.workload
            batch_size = _batch_within(found, i, workload, was.batch_size, within_s)
            rate_factor = was.rate_factor * batch_size / was.batch_size
            new = workload.model_copy(update={"batch_size": batch_size, "rate_factor": rate_factor})
        return None if new == workload else new

    return replan


def _planned(
    fleet: Fleet, workloads: Mapping[int, Workload], groups: tuple[tuple[int, ...], ...]
) -> Assignment:
    shares = {i: Share(w, fleet.compute_s(i, w), fleet.transfer_s(i, w)) for i, w in workloads.items()}
    round_s = max((share.total_s for share in shares.values()), default=0.0)
    idle = {i: replace(share, idle=1 - share.total_s / round_s) for i, share in shares.items()}
    return Assignment(idle, round_s, groups)


def _proportional_batches(fleet: Fleet, uniform: Mapping[int, Workload]) -> dict[int, Workload]:
    """The batch sizes at the shortest round in which the fleet's examples per step are not fewer."""
    if any(w.steps is None for w in uniform.values()):
        accepted = "with policy 'proportional-batch' a round is a number of steps: give train.local_steps"
        raise ConfigError("train.local_steps", None, accepted)
    total = sum(w.batch_size for w in uniform.values())
    transfers = {i: fleet.transfer_s(i) for i in uniform}
    most = {i: _largest_batch(fleet, i, w) for i, w in uniform.items()}

    def batches(round_s: float) -> dict[int, int]:
        return {i: _batch_within(fleet, i, w, most[i], round_s - transfers[i]) for i, w in uniform.items()}

    high = max(fleet.compute_s(i, w) + transfers[i] for i, w in uniform.items())
    if sum(batches(high).values()) < total:
        # Memory or data keeps the others from taking over what the slowest would leave.
        return {i: _with_batch(w, min(w.batch_size, most[i]), most[i]) for i, w in uniform.items()}
    # No round is shorter than the slowest device's with batches of one.
    low = max(_compute_of_batch(fleet, i, w, 1) + transfers[i] for i, w in uniform.items())
    if sum(batches(low).values()) >= total:
        high = low
    else:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(batches(middle).values()) >= total else (middle, high)
    free, growth = batches(high * (1 + _FREE)), _MOST_GROWTH
    while sum(min(b, growth * uniform[i].batch_size) for i, b in free.items()) < total:
        growth *= 2
    return {i: _with_batch(w, min(free[i], growth * w.batch_size), most[i]) for i, w in uniform.items()}


def _with_batch(workload: Workload, batch_size: int, most: int) -> Workload:
    """The workload at another batch size, its rate with it; most: the largest that the data allows."""
    factor = batch_size / min(workload.batch_size, most)
    return workload.model_copy(update={"batch_size": batch_size, "rate_factor": factor})


def _largest_batch(fleet: Fleet, i: int, workload: Workload) -> int:
    """As far as data and memory go."""
    data = fleet.nodes[i].data
    most = max(1, len(data)) if data is not None else 1
    return _largest(most, lambda b: fleet.fits(i, workload.model_copy(update={"batch_size": b})))


def _batch_within(fleet: Fleet, i: int, workload: Workload, most: int, seconds: float) -> int:
    """The largest batch size up to `most` with which the steps take at most so many seconds; at least 1."""
    return _largest(most, lambda b: _compute_of_batch(fleet, i, workload, b) <= seconds)


def _compute_of_batch(fleet: Fleet, i: int, workload: Workload, batch_size: int) -> float:
    """Seconds of a round's steps, all of full batches."""
    one = workload.model_copy(update={"batch_size": batch_size, "steps": 1})
    return (workload.steps or 1) * fleet.compute_s(i, one)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1, ..., most that fits, where all smaller ones do; at least 1."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _steps_that_fit(
    fleet: Fleet, uniform: Mapping[int, Workload], config: AssignConfig
) -> dict[int, Workload]:
    deadline_s = config.deadline_s
    if deadline_s is None:
        deadline_s = max(fleet.compute_s(i, w) + fleet.transfer_s(i) for i, w in uniform.items())
    chosen = {}
    for i, w in uniform.items():
        left_s = (deadline_s - fleet.transfer_s(i)) * (1 + 1e-9)
        one_s = fleet.compute_s(i, w.model_copy(update={"steps": 1}))
        if one_s > left_s:
            needed = one_s + fleet.transfer_s(i)
            accepted = f"at least {needed:.3g} for one step of node {i} ({fleet.nodes[i].profile.name})"
            raise ConfigError("assign.deadline_s", deadline_s, accepted)
        # Last batches of epochs are smaller: more steps may fit than of full ones.
        most = config.max_steps or _MOST_STEPS
        chosen[i] = w.model_copy(update={"steps": _most_steps(fleet, i, w, most, left_s)})
    return chosen


def _most_steps(fleet: Fleet, i: int, workload: Workload, most: int, seconds: float) -> int:
    """The most steps, up to `most`, that take at most so many seconds; at least 1."""

    def fits(steps: int) -> bool:
        return fleet.compute_s(i, workload.model_copy(update={"steps": steps})) <= seconds

    return _largest(most, fits)


def _widths_that_fit(
    fleet: Fleet, uniform: Mapping[int, Workload], config: AssignConfig
) -> dict[int, Workload]:
    def round_s(i: int, workload: Workload) -> float:
        return fleet.compute_s(i, workload) + fleet.transfer_s(i, workload)

    widest_first = sorted(fleet.widths, reverse=True)
    choices = {
        i: [w.model_copy(update={"width": width}) for width in widest_first] for i, w in uniform.items()
    }
    rounds = sorted(round_s(i, widest) for i, (widest, *_) in choices.items())
    deadline_s = (config.deadline_s or rounds[len(rounds) // 2]) * (1 + 1e-9)
    chosen = {}
    for i, narrower in choices.items():
        fitting = (w for w in narrower if round_s(i, w) <= deadline_s and fleet.fits(i, w))
        chosen[i] = next(fitting, narrower[-1])
    return chosen


def narrowed(model: Model, width: float | None) -> Model:
    """The model with that share of each set of units, rounded up; whole where None or 1.

    Raises ConfigError where it has none.
    """
    if width is None or width == 1:
        return model
    return model.narrowed(tuple(math.ceil(width * n) for n in model.narrowing.counts.values()))


def _groups(fleet: Fleet, uniform: Mapping[int, Workload], num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Groups of like round time, the fastest first: the partition of the sorted logarithms with the smallest
    sum of squares about the groups' means, found by dynamic programming."""
    ids = sorted(uniform, key=lambda i: (fleet.compute_s(i, uniform[i]) + fleet.transfer_s(i), i))
    if num_groups <= 1:
        return (tuple(sorted(ids)),) if ids else ()
    logs = [math.log(fleet.compute_s(i, uniform[i]) + fleet.transfer_s(i)) for i in ids]
    sums, squares = [0.0], [0.0]
    for x in logs:
        sums.append(sums[-1] + x)
        squares.append(squares[-1] + x * x)

    def spread(a: int, b: int) -> float:
        return max(0.0, squares[b] - squares[a] - (sums[b] - sums[a]) ** 2 / (b - a))

    n = len(ids)
    best = [[math.inf] * (n + 1) for _ in range(num_groups + 1)]
    cut = [[0] * (n + 1) for _ in range(num_groups + 1)]
    best[0][0] = 0.0
    for g in range(1, num_groups + 1):
        for b in range(g, n + 1):
            best[g][b], cut[g][b] = min((best[g - 1][a] + spread(a, b), a) for a in range(g - 1, b))
    groups, end = [], n
    for g in range(num_groups, 0, -1):
        groups.append(tuple(sorted(ids[cut[g][end] : end])))
        end = cut[g][end]
    return tuple(reversed(groups))


def refuse_too_large(fleet: Fleet, assignment: Assignment) -> None:
    """Raises ConfigError for the first node that has not the memory for its local training."""
    for i, share in assignment.shares.items():
        node, workload = fleet.nodes[i], share.workload
        memory_bytes = fleet.cost(i, workload).memory_bytes
        if memory_bytes > node.profile.memory_bytes:
            model = fleet.training(i, workload).model or fleet.learner.model
            accepted = (
                f"{node.role} {i} ({node.profile.name}) needs {_megabytes(memory_bytes)} for"
                f" {model.label} at batch size {workload.batch_size} and has"
                f" {_megabytes(node.profile.memory_bytes)}"
            )
            raise ConfigError("fleet.devices", node.profile.name, accepted)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
