"""Prague (Luo, He, Zhuo, Qian 2020, https://doi.org/10.1145/3373376.3378499; preprint arXiv:1909.08029).

Worker i at step k: gradient of a mini-batch at its own x_i, x_i <- x_i - eta G, a request to the group
generator, then partial all-reduce in the group G that it names: x_j <- (1/|G|) sum_{l in G} x_l for all j in
G. The generator GG sees no tensor. It keeps a buffer GB[w] of groups per worker and the count c[w] of its
requests; a group fires when it heads the buffers of all of its members and all of them wait. Smart: a
request of a worker whose buffer is empty divides D, all workers with empty buffers, into random groups of
about k; the slow-worker filter leaves out of D whoever is C_thres or more requests behind. Random: each
request makes one group of the worker and k - 1 others, and is answered when that one has met: an ablation.

Choices. The details of buffers and division are a reconstruction (patterns/groups.py). k = 3 and C_thres = 4
are not the paper's figures. Groups meet in rings of ascending ids; optimiser state stays with its worker. A
worker that has made its steps leaves, and is planned in no more. Faults, of which the paper says nothing:
when a member is gone its group is dissolved; members for whom it came to nothing keep their models and meet
as a new group. While the generator is gone, steps stay without averaging; one that returns starts with
empty buffers and plans in whoever has asked it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from edgefl.errors import ConfigError, PeerGone
from edgefl.learning.work import Gradient, GradientResult
from edgefl.nodes import Back, Faults, Gone, Message, Method, MethodConfig, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.patterns.all_reduce import CalledOff, Chunk, all_reduce_mean
from edgefl.patterns.groups import ANYBODY, GroupBuffers, divide, divide_by_machine
from edgefl.patterns.reports import ALL_FINITE


class PragueConfig(MethodConfig):
    """How groups are made; the gradient and the optimiser are [train]'s."""

    groups: Literal["smart", "random"] = "smart"
    """Divisions of all who are free, or a random group for each request."""
    group_size: int = Field(default=3, ge=1)
    """k: members of a group, about."""
    filter_requests: int = Field(default=4, ge=0)
    """C_thres: who is so many requests behind the one who asks is not drafted; 0: everybody is."""
    division: Literal["random", "inter-intra"] = "random"
    """inter-intra: heads of machines first, then each machine; for fleets with several workers on one."""
    workers_per_machine: int = Field(default=4, ge=1)
    """inter-intra: consecutive workers on one machine."""


@dataclass(frozen=True)
class Tell(Message):
    """What a worker tells the generator: one kind of message, so that all of it comes in order.

    what: "request": it has made step `number` and waits for a group; "done": it has the mean of group
    `number`; "failed": it kept its own model, since a member of group `number` went; "leaving": it has made
    its steps.
    generator_life: whom a request is for, as far as its sender knows.
    """

    what: str
    number: int
    generator_life: int = 0


@dataclass(frozen=True)
class AskAgain(Message):
    """The request was for an earlier life of the generator; its sender may have given it up since."""


@dataclass(frozen=True)
class Meet(Message):
    """A group fires. lives: of its members. initiator: whose request it answers, or ANYBODY."""

    group: int
    members: tuple[int, ...]
    lives: tuple[int, ...]
    initiator: int


@dataclass(frozen=True)
class Dissolved(Message):
    """A member of this group is gone."""

    stale_by = "group"
    group: int


async def worker(node: Node) -> Vector:
    groups = PartialAllReduce(node.saved["generator_life"] if node.saved else 0)
    x = await steps(node, groups.average, lambda: {"generator_life": groups.generator_life})
    node.send(node.fleet.ids("generator"), Tell("leaving", 0))
    return x


async def steps(
    node: Node,
    average: Callable[[Node, Vector, int], Awaitable[Vector]],
    kept: Callable[[], dict[str, Any]] = dict,
) -> Vector:
    """A step on one mini-batch, then an average in a group: average(node, x, step). kept: saved beside x."""
    assert node.data is not None
    start = node.model.init()
    saved = node.saved or {"x": start, "state": node.optimizer.init(start.layout), "step": 0}
    x: Vector = saved["x"]
    state = saved["state"]
    for k in node.rounds(saved["step"]):
        r: GradientResult = await node.compute(Gradient(x, node.data, k, node.workload))
        x, state = node.optimizer.step(x, r.gradient, state, k)
        x = await average(node, x, k)
        node.record(round=k, train_loss=r.loss)
        node.publish(x, step=k + 1)
        await node.save(x=x, state=state, step=k + 1, **kept())
    return x


class PartialAllReduce:
    """Averaging in the groups of a generator, of whose lives the newest that has been heard of counts."""

    def __init__(self, generator_life: int) -> None:
        self.generator_life = generator_life

    async def average(self, node: Node, x: Vector, k: int) -> Vector:
        """Ask for a group and average in it, and in the groups that others made meanwhile."""
        (generator,) = node.fleet.ids("generator")
        node.send(generator, Tell("request", k, self.generator_life))
        while True:
            m: Message = await node.receive(Meet, AskAgain, Gone, Back, sender=generator)
            if isinstance(m, Gone):
                return x  # nobody forms groups now
            if isinstance(m, Back | AskAgain):
                self.generator_life = m.life
                node.send(generator, Tell("request", k, m.life))
            if not isinstance(m, Meet) or not self._is_meant(node, m):
                continue
            off = (node.receive(Dissolved, Gone, Back, sender=generator, group=m.group),)
            try:
                x = await all_reduce_mean(node, m.members, x, weight=None, tag=m.group, unless=off)
            except PeerGone as gone:
                node.send(generator, Tell("failed", m.group))
                if isinstance(gone, CalledOff) and not isinstance(gone.message, Dissolved):
                    self.generator_life = max(self.generator_life, gone.message.life)
                    return x  # the generator is gone, or has begun anew
                continue
            if len(m.members) > 1:
                node.send(generator, Tell("done", m.group))
            if m.initiator in (ANYBODY, node.id):
                return x

    def _is_meant(self, node: Node, m: Meet) -> bool:
        """Groups of earlier lives, the generator's or this node's, have been dissolved."""
        return m.life >= self.generator_life and m.lives[m.members.index(node.id)] == node.life


async def generator(node: Node) -> None:
    config: PragueConfig = node.config
    workers = node.fleet.ids("worker")
    buffers = GroupBuffers(workers, first_id=node.life << 32)
    present = set(workers) if node.life == 0 else set()
    c, lives = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)
    while True:
        m: Message = await node.receive(Tell, Gone, Back)
        w = m.sender
        if isinstance(m, Tell) and m.life < lives[w]:
            continue  # of a life that is over
        if not isinstance(m, Tell) or m.what == "leaving":
            present.discard(w)
            lives[w] = lives[w] + 1 if isinstance(m, Gone) else m.life
            for broken in buffers.lose(w):
                node.send({*broken.members, w}, Dissolved(broken.id))
        elif m.what == "done":
            buffers.done(w, m.number)
        elif m.what == "failed":
            buffers.failed(w, m.number)
        elif m.generator_life != node.life:
            node.send(w, AskAgain())
        elif m.number >= c[w] or w not in present:
            present.add(w)
            c[w], lives[w] = m.number + 1, m.life
            buffers.request(w)
            for members, initiator in _new_groups(node, config, buffers, present, c, w):
                buffers.add(members, initiator)
        for group in buffers.fire():
            its_lives = tuple(lives[v] for v in group.members)
            node.send(group.members, Meet(group.id, tuple(group.members), its_lives, group.initiator))


def _new_groups(
    node: Node, config: PragueConfig, buffers: GroupBuffers, present: set[int], c: dict[int, int], i: int
) -> list[tuple[list[int], int]]:
    """The groups, with their initiators, that a request of worker i gives rise to."""
    rng = node.rng("groups", buffers.next_id)
    if config.groups == "random":
        others = sorted(present - {i})
        drawn = rng.choice(others, min(config.group_size - 1, len(others)), replace=False).tolist()
        return [([i, *drawn], i)]
    if not buffers.is_empty(i):
        return []
    free = [w for w in sorted(present) if buffers.is_empty(w)]
    if config.filter_requests:
        free = [w for w in free if w == i or c[i] - c[w] < config.filter_requests]
    if config.division == "random":
        groups = divide(free, config.group_size, rng)
    else:
        m, first = config.workers_per_machine, node.fleet.ids("worker")[0]
        num_machines = len(c) // m
        machines = [[w for w in free if (w - first) // m == machine] for machine in range(num_machines)]
        groups = divide_by_machine(machines, rng)
    return [(members, ANYBODY) for members in groups]


def _refuse_impossible(plan: RunPlan) -> None:
    config: PragueConfig = plan.config
    n = len(plan.ids("worker"))
    if config.group_size > n:
        raise ConfigError(
            "method.prague.group_size", config.group_size, f"at most {n}, the number of workers"
        )
    if config.division == "inter-intra":
        if config.groups == "random":
            raise ConfigError("method.prague.division", config.division, 'groups "smart", which it divides')
        if n % config.workers_per_machine:
            accepted = f"a divisor of the number of workers, {n}"
            raise ConfigError("method.prague.workers_per_machine", config.workers_per_machine, accepted)


def _beside(config: PragueConfig) -> tuple[str, ...]:
    return ("generator",)


METHOD = Method(
    name="prague",
    title="Partial all-reduce in groups drawn by a group generator",
    paper="Luo, He, Zhuo, Qian 2020, https://doi.org/10.1145/3373376.3378499",
    roles={"generator": generator, "worker": worker},
    messages=(Tell, AskAgain, Meet, Dissolved, Chunk),
    config=PragueConfig,
    helpers=_beside,
    ends_with=("worker",),
    needs="complete",
    evaluates="mean",
    prepare=_refuse_impossible,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(ALL_FINITE,),
)
