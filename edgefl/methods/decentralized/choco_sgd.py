"""CHOCO-SGD (Koloskova, Stich, Jaggi 2019, Algorithm 2, https://arxiv.org/abs/1902.00340).

x_i: node i's model; xh_i: its public copy, which it and its neighbors hold, 0 at first; Q: [compress].
Step: h = x_i - eta g_i(x_i); q_i = Q(h - xh_i), sent to the neighbors; xh_j <- xh_j + q_j for the
neighbors' and the own copy; x_i <- h + gamma sum_j W_ij (xh_j - xh_i). W symmetric and doubly stochastic
([network] mixing).
Choices: gamma is 1 without compression and 0.2 with it where not given; a quantiser's q is scaled by 1 / (1
+ omega), its variance bound, which makes it contractive; Q has no memory of its own, since h - xh is one.
Each neighbor's copy is kept, not only their weighted sum, so that one that is gone can be dropped: its
weight falls to the node itself. The copies must be equal at both ends, and who returns has missed some: both
ends of its edges begin anew with copies of 0, from a step that they agree on. So a node may hold more than
one public copy, each for the neighbors whose edges began at one step. local_steps of [train] above 1 make
that many steps in place of one gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Faults, Message, Method, MethodConfig, Node
from edgefl.parameters import Vector, mix
from edgefl.patterns.compression import Sent, contracted, opened, packed_difference
from edgefl.patterns.edges import MESSAGES, Edges
from edgefl.patterns.reports import ALL_FINITE


class ChocoConfig(MethodConfig):
    """gamma; Q is [compress], W is [network]'s, eta and B are [train]'s."""

    gamma: float | None = Field(default=None, gt=0, le=1)
    """Consensus step size; 1 without compression and 0.2 with it where not given."""


@dataclass(frozen=True)
class Difference(Message):
    """q of a step."""

    stale_by = "step"
    once_by = ("sender", "life", "step")
    step: int
    values: Sent


async def peer(node: Node) -> Vector:
    assert node.data is not None
    gamma = node.config.gamma or (0.2 if node.compress.on else 1.0)
    saved = node.saved or {"x": node.model.init(), "step": 0, "state": None}
    x: Vector = saved["x"]
    state = saved["state"]
    edges = Edges(node, saved.get("edges"))
    copies = Copies(node, {} if node.life else saved.get("own", {}), saved.get("theirs", {}))
    for k in node.rounds(await edges.begin(saved["step"])):
        r: Trained = await node.compute(LocalSGD(x, node.data, k, node.workload, state=state))
        h, state = r.parameters, r.state
        neighbors = await edges.settled(k)
        copies.begin({j: edges.since[j] for j in neighbors})
        for receivers, q in copies.differences(h, k):
            node.send(receivers, Difference(k, q))
        heard: list[int] = []
        async for m in edges.gather(Difference, neighbors, k):
            copies.move(m.sender, m.values)
            heard.append(m.sender)
        x = copies.drawn(h, sorted(heard), gamma)
        node.record(round=k, train_loss=r.loss)
        node.publish(x, step=k + 1)
        kept = {"own": dict(copies.own), "theirs": dict(copies.theirs), "edges": dict(edges.since)}
        await node.save(x=x, step=k + 1, state=state, **kept)
    return x


class Copies:
    """The public copies that a node and its neighbors hold of each other.

    own: xh_i by the step at which the edges of those who hold it began; theirs: xh_j and that step, by j.
    """

    def __init__(self, node: Node, own: dict[int, Vector], theirs: dict[int, tuple[int, Vector]]) -> None:
        self._node, self._zero = node, node.model.init() * 0.0
        self.own, self.theirs = dict(own), dict(theirs)

    def begin(self, since: dict[int, int]) -> None:
        """These neighbors take part in a step; the edge of each began at since[j]. Others are dropped."""
        known = {j: copy for j, copy in self.theirs.items() if copy[0] == since.get(j)}
        self.theirs = {j: known.get(j, (begun, self._zero)) for j, begun in since.items()}
        self.own = {begun: self.own.get(begun, self._zero) for begun in sorted(set(since.values()))}

    def differences(self, h: Vector, k: int) -> list[tuple[list[int], Sent]]:
        """q_i for those who hold each own copy, which moves by it."""
        found = []
        for begun, xh_i in self.own.items():
            q = packed_difference(self._node, h - xh_i, k)
            self.own[begun] = xh_i + self._step(q)
            found.append(([j for j, copy in self.theirs.items() if copy[0] == begun], q))
        return found

    def move(self, j: int, q: Sent) -> None:
        """xh_j <- xh_j + q_j."""
        begun, xh_j = self.theirs[j]
        self.theirs[j] = begun, xh_j + self._step(q)

    def drawn(self, h: Vector, heard: list[int], gamma: float) -> Vector:
        """h + gamma sum_j W_ij (xh_j - xh_i) over those that were heard, with the copy xh_i that j holds."""
        x, W = h, self._node.fleet.W
        for begun, xh_i in self.own.items():
            of = {j: self.theirs[j][1] for j in heard if self.theirs[j][0] == begun}
            row = {j: W[j] for j in of}
            row[self._node.id] = 1 - sum(row.values())  # W_ii, and the shares of the others
            x = x + (mix({**of, self._node.id: xh_i}, row) - xh_i) * gamma
        return x

    def _step(self, q: Sent) -> Vector:
        return contracted(self._node.compress, opened(self._node, q, self._zero.layout))


METHOD = Method(
    name="choco-sgd",
    title="Decentralized SGD with compressed differences",
    paper="Koloskova, Stich, Jaggi 2019, https://arxiv.org/abs/1902.00340",
    roles={"peer": peer},
    messages=(Difference, *MESSAGES),
    config=ChocoConfig,
    ends_with=("peer",),
    needs="connected",
    evaluates="each",
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(ALL_FINITE,),
)
