"""Sites: a few learners on one fast network that take each step together, led by the lowest that lives.

All learners of a site hold the same model. Per step each takes one mini-batch gradient, a ring all-reduce in
ascending id brings the mean to all, and the head's order says what becomes of it. When a member is lost the
survivors start the unfinished step anew from the head's model and state; a lost head is followed by the
lowest survivor. Source: the two-level system of H-ADPSGD (https://arxiv.org/abs/1907.05701); what happens on
a loss is our choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from edgefl.errors import PeerGone
from edgefl.learning.work import Gradient, GradientResult
from edgefl.nodes import Gone, Message, Node, Task
from edgefl.parameters import Vector
from edgefl.parameters.packing import pack, unpack
from edgefl.patterns.all_reduce import ring_all_reduce

State = tuple[Tensor, ...] | None


@dataclass(frozen=True)
class Order(Message):
    """What becomes of the mean gradient of a step: the site applies it, with all that is held, or holds it.

    parameters: the head's model to go on from, where others' models have come into it.
    """

    epoch: int
    step: int
    hold: bool
    parameters: Vector | None


@dataclass(frozen=True)
class Sync(Message):
    """After a loss, all that the head has: the site goes on with these members and the step that it names.

    held: mean gradients that are held.
    """

    members: tuple[int, ...]
    step: int
    parameters: Vector
    state: State
    held: tuple[Vector, ...]


@dataclass(frozen=True)
class Done(Message):
    """A learner has carried out the order of the last step."""


@dataclass(frozen=True)
class End(Message):
    """All have; parameters: the head's model, where it has changed since the last order."""

    parameters: Vector | None


MESSAGES = (Order, Sync, Done, End)


def site_of(node: int, size: int) -> int:
    """The site of a node: `size` consecutive ids each."""
    return node // size


class Site:
    """One learner's share of its site: the model, the optimiser's state, and who is still there.

    step: mean gradients so far, and so the number of the next mini-batch. held: mean gradients that have
    not been applied.
    """

    def __init__(self, node: Node, size: int) -> None:
        begin = site_of(node.id, size) * size
        self.node, self.size = node, size
        self.members: list[int] = list(range(begin, begin + size))
        self.x: Vector = node.model.init()
        self.state: State = node.optimizer.init(self.x.layout)
        self.held: deque[GradientResult] = deque()
        self.step = 0

    @property
    def others(self) -> list[int]:
        return [j for j in self.members if j != self.node.id]

    @property
    def leads(self) -> bool:
        return self.members[0] == self.node.id

    @property
    def epoch(self) -> int:
        return self.size - len(self.members)

    async def mean_gradient(self, x: Vector, k: int) -> GradientResult | None:
        """The mean of the members' gradients at x of their k-th mini-batches, weighted by batch size.

        loss: this learner's own. None where a member was lost; a child task, to be cancelled when one is.
        """
        node = self.node
        assert node.data is not None
        r: GradientResult = await node.compute(Gradient(x, node.data, k, node.workload))
        if len(self.members) == 1:
            return r
        sizes = {j: node.fleet.workload(j).batch_size for j in self.members}
        tag = (self.epoch << 40) + 2 * k  # even: other all-reduces may take odd ones
        try:
            total = await ring_all_reduce(node, self.members, pack(r.gradient) * sizes[node.id], tag=tag)
        except PeerGone:
            return None
        return GradientResult(unpack(total / sum(sizes.values()), r.gradient), r.loss)

    def apply_next(self) -> GradientResult:
        """Apply the oldest gradient that is held, as the step of its own number."""
        G = self.held.popleft()
        number = self.step - len(self.held) - 1
        self.x, self.state = self.node.optimizer.step(self.x, G.gradient, self.state, number)
        return G

    def regroup(self) -> bool:
        """Leave out members that are gone; whether there were any."""
        living = [j for j in self.members if j == self.node.id or self.node.fleet.alive(j)]
        lost = len(living) < len(self.members)
        self.members = living
        return lost

    # --- the head's part ---------------------------------------------------------------------------------

    def order(self, *, changed: bool) -> None:
        """Tell the others what became of the newest mean gradient; changed: and that x is not as theirs."""
        if self.others:
            model = self.x if changed else None
            self.node.send(self.others, Order(self.epoch, self.step - 1, bool(self.held), model))

    def sync(self) -> None:
        """Give the survivors of a loss all that this head has."""
        held = tuple(G.gradient for G in self.held)
        if self.others:
            self.node.send(self.others, Sync(tuple(self.members), self.step, self.x, self.state, held))

    async def end(self, *, changed: bool) -> None:
        """Wait until all others have carried out the last order, and let them go; changed: with this x."""
        waiting = set(self.others)
        while waiting:
            m = await self.node.receive(Done, End, Gone, sender=self.others)
            if isinstance(m, End):  # an earlier head had come this far
                changed = False
                break
            waiting.discard(m.sender)
            if isinstance(m, Gone) and self.regroup():
                self.sync()
        if self.others:
            self.node.send(self.others, End(self.x if changed else None))

    # --- the others' part ---------------------------------------------------------------------------------

    async def follow(self, last: float) -> bool:
        """Take steps under the head's orders up to `last`.

        True: that is the end; False: the head is lost, and this learner takes its place.
        """
        node = self.node
        while True:
            if self.step >= last:
                ended = await self._ended()
                if ended or self.leads:
                    return ended
                continue
            G = await self._mean_or_loss(node.start(self.mean_gradient(self.x, self.step)))
            order = None if G is None else await self._ordered(G)
            if G is not None and order is not None:
                self._carry_out(order)
                node.record(train_loss=G.loss)
                node.publish(self.x, step=self.step)
            elif await self._rejoined():
                return False

    async def model_of_step(self, k: int) -> Vector:
        """The head's model after step k. Raises PeerGone when the head is lost."""
        m = await self.node.receive(Order, Gone, sender=self.members[0], epoch=self.epoch, step=k)
        if not isinstance(m, Order) or m.parameters is None:
            raise PeerGone(self.members[0])
        return m.parameters

    async def _mean_or_loss(self, computing: Task[GradientResult | None]) -> GradientResult | None:
        m = await self.node.first(computing, self.node.receive(Gone, sender=self.others))
        if m is not computing:
            computing.cancel()
            return None
        value: GradientResult | None = computing.value
        return value

    async def _ordered(self, G: GradientResult) -> Order | None:
        """Take in a mean gradient and wait for what becomes of it; None where a member was lost."""
        self.held.append(G)
        self.step += 1
        fields = {"epoch": self.epoch, "step": self.step - 1}
        m = await self.node.receive(Order, Gone, sender=self.others, **fields)
        return m if isinstance(m, Order) else None

    def _carry_out(self, order: Order) -> None:
        while len(self.held) > order.hold:
            self.apply_next()
        if order.parameters is not None:
            self.x = order.parameters

    async def _rejoined(self) -> bool:
        """After a loss, take over what the head has. True: this learner is the head itself."""
        await self.node.receive(Gone, sender=self.others)
        while True:
            self.regroup()
            if self.leads:
                return True
            m = await self.node.receive(Sync, Gone, sender=self.others)
            if isinstance(m, Sync) and len(m.members) <= len(self.members):
                self._adopt(m)
                return False

    def _adopt(self, m: Sync) -> None:
        self.members = list(m.members)
        self.x, self.state, self.step = m.parameters, m.state, m.step
        self.held = deque(GradientResult(gradient, 0.0) for gradient in m.held)

    async def _ended(self) -> bool:
        """Say that the last order is carried out, until the head lets go. False: a loss, and a new beginning.

        Whoever is let go tells the others: should the head be lost just now, nobody waits for who has left.
        """
        node = self.node
        while self.held:
            self.apply_next()
        while not self.leads:
            head = self.members[0]
            node.send(head, Done())
            m = await node.receive(End, Sync, Gone, sender=head)
            if isinstance(m, End):
                if m.parameters is not None:
                    self.x = m.parameters
                    node.publish(self.x, step=self.step)
                node.send(self.others, End(None))
                return True
            if isinstance(m, Sync):
                self._adopt(m)
                return False
            self.regroup()
        return False


def heads(node: Node, sites: Sequence[int], size: int) -> list[int]:
    """The lowest living learner of each of `sites`, where there is one."""
    found = []
    for s in sites:
        living = [j for j in range(s * size, (s + 1) * size) if node.fleet.alive(j)]
        found += living[:1]
    return found
