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
one at a time; 0: back to back. Staleness of a gradient: averagings of x_i since its batch began.

A partner that is gone closes the exchange without averaging. A worker that has made its steps goes on
answering until all who may ask it have made theirs. One that returns goes on from its last applied gradient;
it may have missed who finished, so it gives partners up that say nothing for long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from edgefl.errors import ConfigError
from edgefl.learning.optimizer import State
from edgefl.learning.work import Gradient, GradientResult
from edgefl.network import Topology
from edgefl.nodes import Back, Faults, Gone, Message, Method, MethodConfig, Node, Task
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.patterns.farewell import Finished, Leaving, patience_s
from edgefl.patterns.reports import ALL_FINITE, answers


class ADPSGDConfig(MethodConfig):
    """How pairs exchange; the gradient and the optimiser are [train]'s."""

    atomic: bool = True
    """Hold an active's gradients while its exchange is open: both ends then average the same models."""
    exchanges_per_step: Literal[0, 1] = 1
    """Exchanges that an active starts per applied gradient; 0: the next as soon as one closes."""
    partner: Literal["random", "cycle", "exponential"] = "random"
    """Each exchange's partner: drawn uniformly; the neighbors in turn; or in turn those at ring distances
    1, 3, 5, 9, ... both ways (known code), on the complete bipartite graph."""


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


def average(active: Vector, passive: Vector) -> Vector:
    """(m_a + m_p) / 2, summed in this order at both ends."""
    return active.middle(passive)


async def worker(node: Node) -> Vector:
    assert node.data is not None
    config: ADPSGDConfig = node.config
    active, last = node.role == "active", last_step(node)
    x, state, steps, exchanges, averagings, asking, left = _begin(node)
    patience = patience_s(node, 2) if node.life else None
    held: deque[tuple[GradientResult, int]] = deque()  # finished gradients, and averagings at their start
    computing: Task[GradientResult] | None = None
    partner: int | None = None
    batches, read_at = steps, averagings
    may_exchange = steps > 0 or config.exchanges_per_step == 0
    news = node.receive(Ask, Reply, Finished, Leaving, Gone, Back)

    while steps < last or partner is not None or asking:
        if computing is None and len(held) < 2 and batches < last:
            computing = node.start(node.compute(Gradient(x, node.data, batches, node.workload)))
            batches, read_at = batches + 1, averagings
        if active and partner is None and may_exchange and steps < last:
            partner = _partner(node, exchanges, left)
            if partner is not None:
                exchanges, may_exchange = exchanges + 1, config.exchanges_per_step == 0
                node.send(partner, Ask(exchanges, x))
        m = await node.first(news, *([computing] if computing else []), timeout_s=patience)
        if m is computing and computing is not None:
            held.append((computing.value, read_at))
            computing = None
        elif isinstance(m, Ask):
            node.send(m.sender, Reply(m.exchange, x))
            x, averagings = average(m.parameters, x), averagings + 1
            node.publish(x, step=steps)
        elif isinstance(m, Reply) and m.sender == partner and m.exchange == exchanges:
            x, averagings, partner = average(x, m.parameters), averagings + 1, None
            if not config.atomic:  # else a gradient follows, at the end too
                node.publish(x, step=steps)
        elif isinstance(m, Gone | Finished | Leaving):
            asking.discard(m.sender)
            partner = None if m.sender == partner else partner
            left |= {m.sender} if isinstance(m, Leaving) else set()
        elif isinstance(m, Back) and not active and m.sender in node.fleet.neighbors:
            asking.add(m.sender)
        elif m is None and partner is not None:
            left, partner = left | {partner}, None
        elif m is None and steps >= last:
            break
        while held and (partner is None or not config.atomic):
            G, seen = held.popleft()
            x, state = node.optimizer.step(x, G.gradient, state, steps)
            steps, may_exchange = steps + 1, True
            node.record(train_loss=G.loss, staleness=averagings - seen)
            node.publish(x, step=steps)
            if partner is None and not held:
                counts = {"steps": steps, "exchanges": exchanges, "averagings": averagings}
                await node.save(x=x, state=state, asking=sorted(asking), left=sorted(left), **counts)
    node.send(node.fleet.neighbors, Finished() if active else Leaving())
    return x


def _begin(node: Node) -> tuple[Vector, State | None, int, int, int, set[int], set[int]]:
    """x_i, the optimiser's state, steps, exchanges and averagings made, who may ask, who has left."""
    if node.saved is None:
        x = node.model.init()
        asking = set() if node.role == "active" else set(node.fleet.neighbors)
        return x, node.optimizer.init(x.layout), 0, node.life << 32, 0, asking, set()
    s = node.saved
    exchanges = max(s["exchanges"], node.life << 32)  # replies to an earlier life are told apart
    return s["x"], s["state"], s["steps"], exchanges, s["averagings"], set(s["asking"]), set(s["left"])


def last_step(node: Node) -> float:
    """[stop] rounds, or infinity."""
    stop = node.num_rounds
    return float("inf") if stop is None else stop


def _partner(node: Node, exchange: int, left: set[int]) -> int | None:
    neighbors = node.fleet.neighbors
    if node.config.partner == "exponential":
        neighbors = tuple(j for j in exponential_peers(node.id, node.fleet.topology.n) if j in neighbors)
    living = node.fleet.living([j for j in neighbors if j not in left] if left else neighbors)
    if not living:
        return None
    if node.config.partner == "random":
        return living[node.rng("partner", exchange).integers(len(living))]
    return living[exchange % len(living)]


def exponential_peers(rank: int, n: int) -> list[int]:
    """Those at ring distances 1 and 1 + 2^i, i = 1 .. log2(n - 1), both ways round, each once, in that order.

    >>> exponential_peers(1, 8)
    [2, 0, 4, 6]
    """
    hops = [1] + [1 + 2**i for i in range(1, (n - 1).bit_length())]
    return list(dict.fromkeys((rank + way) % n for hop in hops for way in (hop, -hop)))


def _refuse_impossible(plan: RunPlan) -> None:
    topology = plan.network.topology
    is_complete = topology.num_edges == (topology.n // 2) * ((topology.n + 1) // 2)
    if plan.config.partner == "exponential" and not is_complete:
        accepted = f"the complete bipartite graph, not {topology.name}"
        raise ConfigError("method.ad-psgd.partner", "exponential", accepted)


def sides(topology: Topology) -> tuple[str, ...]:
    """The side with the lowest id is passive; on the complete bipartite graph these are the even ids."""
    passives = set(topology.sides()[0])
    return tuple("passive" if i in passives else "active" for i in range(topology.n))


METHOD = Method(
    name="ad-psgd",
    title="Asynchronous decentralized parallel SGD",
    paper="Lian, Zhang, Zhang, Liu 2018, https://arxiv.org/abs/1710.06952",
    roles={"passive": worker, "active": worker},
    messages=(Ask, Reply, Finished, Leaving),
    config=ADPSGDConfig,
    assign_roles=sides,
    ends_with=("passive", "active"),
    needs="bipartite",
    evaluates="each",
    prepare=_refuse_impossible,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(ALL_FINITE, answers(Ask, Reply)),
)
