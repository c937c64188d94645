"""AD-PSGD (Lian, Zhang, Zhang, Liu 2018, Algorithm 1, https://arxiv.org/abs/1710.06952).

Worker i never waits with computing: it takes gradients of mini-batches at the model xhat that it read when a
batch began, and applies each to its current model x_i. Beside that, models are averaged in pairs, x_a, x_p
<- (x_a + x_p) / 2. The graph is bipartite and only the active side asks and waits, so nobody can deadlock.

Choices where the paper and its re-implementations leave room. `atomic` (the paper's W_k is symmetric and
doubly stochastic): the passive averages in the instant in which the request arrives and replies with what
it was; the active holds gradients that end while its exchange is open: at most one batch runs ahead, and
when the exchange closes it averages, then applies them in order. With atomic off they are applied at once,
as the code known to us does. Both ends compute (m_a + m_p) / 2 in this order and are bit-equal. The
optimiser's state is each worker's own. `exchanges_per_step` 1: one exchange after each applied gradient,
one at a time; 0: back to back. A partner that is gone closes the exchange without averaging. A worker that
has made its steps goes on answering until all who may ask it have made theirs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from edgefl.learning.work import Gradient, GradientResult
from edgefl.network import Topology
from edgefl.nodes import Faults, Gone, Message, Method, MethodConfig, Node, Task
from edgefl.parameters import Vector


class ADPSGDConfig(MethodConfig):
    """How pairs exchange; the gradient and the optimiser are [train]'s."""

    atomic: bool = True
    """Hold an active's gradients while its exchange is open: both ends then average the same models."""
    exchanges_per_step: Literal[0, 1] = 1
    """Exchanges that an active starts per applied gradient; 0: the next as soon as one closes."""
    partner: Literal["random", "cycle"] = "random"
    """Each exchange's partner: drawn uniformly, or the neighbors in turn."""


@dataclass(frozen=True)
class Ask(Message):
    """An active's model m_a. exchange: counts its exchanges."""

    exchange: int
    parameters: Vector


@dataclass(frozen=True)
class Reply(Message):
    """A passive's model m_p as it was when the request arrived."""

    exchange: int
    parameters: Vector


@dataclass(frozen=True)
class Finished(Message):
    """An active has made its steps and asks no more."""


def average(active: Vector, passive: Vector) -> Vector:
    """(m_a + m_p) / 2, summed in this order at both ends."""
    return (active + passive) / 2


async def worker(node: Node) -> Vector:
    assert node.data is not None
    config: ADPSGDConfig = node.config
    active = node.role == "active"
    x = node.model.init()
    state = node.optimizer.init(x.layout)
    asking = set() if active else set(node.fleet.neighbors)  # who may still ask this passive
    held: deque[tuple[GradientResult, int]] = deque()  # finished gradients, and averagings at their start
    computing: Task[GradientResult] | None = None
    partner: int | None = None
    steps, batches, exchanges, averagings, read_at = 0, 0, 0, 0, 0
    last = _last_step(node)
    may_exchange = config.exchanges_per_step == 0

    while steps < last or partner is not None or asking:
        if computing is None and len(held) < 2 and batches < last:
            computing = node.start(node.compute(Gradient(x, node.data, batches, node.workload)))
            batches, read_at = batches + 1, averagings
        if active and partner is None and may_exchange and steps < last:
            partner = _partner(node, exchanges)
            if partner is not None:
                exchanges, may_exchange = exchanges + 1, config.exchanges_per_step == 0
                node.send(partner, Ask(exchanges, x))
        m = await node.first(node.receive(Ask, Reply, Finished, Gone), *([computing] if computing else []))
        if m is computing and computing is not None:
            held.append((computing.value, read_at))
            computing = None
        elif isinstance(m, Ask):
            node.send(m.sender, Reply(m.exchange, x))
            x, averagings = average(m.parameters, x), averagings + 1
            node.publish(x, step=steps)
        elif isinstance(m, Reply) and m.sender == partner and m.exchange == exchanges:
            x, averagings, partner = average(x, m.parameters), averagings + 1, None
        elif isinstance(m, Gone | Finished):
            asking.discard(m.sender)
            partner = None if m.sender == partner else partner
        while held and (partner is None or not config.atomic):
            G, seen = held.popleft()
            x, state = node.optimizer.step(x, G.gradient, state, steps)
            steps, may_exchange = steps + 1, True
            node.record(train_loss=G.loss, staleness=averagings - seen)
            node.publish(x, step=steps)
    if active:
        node.send(node.fleet.neighbors, Finished())
    return x


def _last_step(node: Node) -> float:
    stop = node.num_rounds
    return float("inf") if stop is None else stop


def _partner(node: Node, exchange: int) -> int | None:
    living = [j for j in node.fleet.neighbors if node.fleet.alive(j)]
    if not living:
        return None
    if node.config.partner == "cycle":
        return living[exchange % len(living)]
    return int(node.rng("partner", exchange).choice(living))


def sides(topology: Topology) -> tuple[str, ...]:
    """The side with the lowest id is passive; on the complete bipartite graph these are the even ids."""
    passives = set(topology.sides()[0])
    return tuple("passive" if i in passives else "active" for i in range(topology.n))


METHOD = Method(
    name="ad-psgd",
    title="Asynchronous decentralized parallel SGD",
    paper="Lian, Zhang, Zhang, Liu 2018, https://arxiv.org/abs/1710.06952",
    roles={"passive": worker, "active": worker},
    messages=(Ask, Reply, Finished),
    config=ADPSGDConfig,
    assign_roles=sides,
    ends_with=("passive", "active"),
    needs="bipartite",
    evaluates="each",
    tolerates=Faults(crashes=True, partitions=True),
)
