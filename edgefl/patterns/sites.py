"""Sites: a few learners on one fast network that take each step together, led by the lowest that lives.

All learners of a site hold the same model. Per step each takes one mini-batch gradient, a ring all-reduce in
ascending id brings the mean to all, and the head's order says what becomes of it. When a member is lost or
returns (patterns/site_members.py) all start the unfinished step anew from the head's model and state; a lost
head is followed by the member that has been there longest, the lowest of those who never left. Source: the
two-level system of H-ADPSGD (https://arxiv.org/abs/1907.05701); losses and returns are our choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edgefl.errors import PeerGone
from edgefl.learning.work import Gradient, GradientResult
from edgefl.nodes import Gone, Message, Node, Transfer
from edgefl.parameters import Vector
from edgefl.parameters.packing import pack, unpack
from edgefl.patterns.all_reduce import ring_all_reduce
from edgefl.patterns.farewell import patience_s
from edgefl.patterns.site_members import NEWS, Members, Return

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
    """After a loss or a return, all that the head has: the site goes on with these members, of these lives,
    and the step that it names.

    epoch: no other Sync has it. held: mean gradients that are held.
    """

    epoch: int
    members: tuple[int, ...]
    lives: tuple[int, ...]
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


MESSAGES = (Order, Sync, Done, End, Return)


def site_of(node: int, size: int) -> int:
    """The site of a node: `size` consecutive ids each."""
    return node // size


class Site:
    """One learner's share of its site: the model, the optimiser's state, and who is there.

    epoch: of the head's last word on who the members are, 0 before. step: mean gradients so far, and so the
    number of the next mini-batch. held: mean gradients that have not been applied.
    """

    def __init__(self, node: Node, size: int) -> None:
        """Goes on with what kept() gave, where that has been saved."""
        begin = site_of(node.id, size) * size
        self.node = node
        self.members = Members(node, list(range(begin, begin + size)))
        self.held: deque[GradientResult] = deque()
        self.epoch = self._epochs = 0
        self._syncing: Transfer | None = None
        saved: Mapping[str, Any] = node.saved or {"x": node.model.init(), "step": 0}
        self.x: Vector = saved["x"]
        self.step: int = saved["step"]
        self.state: State = saved.get("state", node.optimizer.init(self.x.layout))
        if node.life == 0 and node.saved is not None:  # it was interrupted, and everybody else with it
            self.epoch, self._epochs = saved["epochs"]
            self.members.ids, self.members.lives = list(saved["members"]), dict(saved["lives"])

    def kept(self) -> dict[str, Any]:
        """What to save while nothing is held."""
        members = {"members": list(self.members.ids), "lives": dict(self.members.lives)}
        epochs = (self.epoch, self._epochs)
        return {"x": self.x, "state": self.state, "step": self.step, "epochs": epochs, **members}

    @property
    def others(self) -> list[int]:
        return self.members.others

    @property
    def leads(self) -> bool:
        return self.members.leads

    async def mean_gradient(self, x: Vector, k: int) -> GradientResult | None:
        """The mean of the members' gradients at x of their k-th mini-batches, weighted by batch size.

        loss: this learner's own. None where a member was lost; a child task, to be cancelled when one is.
        """
        node, members = self.node, list(self.members.ids)
        assert node.data is not None
        r: GradientResult = await node.compute(Gradient(x, node.data, k, node.workload))
        if len(members) == 1:
            return r
        sizes = {j: node.fleet.workload(j).batch_size for j in members}
        tag = (self.epoch << 32) + 2 * k  # even: other all-reduces may take odd ones
        try:
            total = await ring_all_reduce(node, members, pack(r.gradient) * sizes[node.id], tag=tag)
        except PeerGone as gone:
            self.members.lose(gone.node)
            return None
        return GradientResult(unpack(total / sum(sizes.values()), r.gradient), r.loss)

    def apply_next(self) -> GradientResult:
        """Apply the oldest gradient that is held, as the step of its own number."""
        G = self.held.popleft()
        number = self.step - len(self.held) - 1
        self.x, self.state = self.node.optimizer.step(self.x, G.gradient, self.state, number)
        return G

    # --- the head's part ---------------------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        """Whether the head has to say anew who the members are."""
        return self.members.changed or bool(self.members.returned)

    def order(self, *, changed: bool) -> None:
        """Tell the others what became of the newest mean gradient; changed: and that x is not as theirs."""
        if self.others:
            model = self.x if changed else None
            self.node.send(self.others, Order(self.epoch, self.step - 1, bool(self.held), model))

    def sync(self) -> None:
        """Say who the members are now, and give them all that this head has."""
        members = self.members
        members.admit()
        self._epochs += 1
        self.epoch = int(self.node.rng("epoch", self.node.life, self._epochs).integers(1, 2**31))
        held = tuple(G.gradient for G in self.held)
        lives = tuple(self.node.life if j == self.node.id else members.lives[j] for j in members.ids)
        who = (self.epoch, tuple(members.ids), lives)
        if self._syncing is not None:
            self._syncing.cancel()  # whom it has not reached hears the newer word sooner
        if self.others:
            self._syncing = self.node.send(self.others, Sync(*who, self.step, self.x, self.state, held))

    async def end(self, *, changed: bool) -> None:
        """Wait until all others have carried out the last order, and let them go; changed: with this x."""
        waiting = set(self.others)
        while waiting:
            m = await self.node.receive(Done, End, *NEWS)
            if isinstance(m, End):  # an earlier head had come this far
                changed = False
                break
            if isinstance(m, Done):
                waiting.discard(m.sender)
            self.members.hear(m)
            if self.unsettled:  # all carry out what is held, and say so again
                self.sync()
                waiting = set(self.others)
        if self.others:
            self.node.send(self.others, End(self.x if changed else None))

    # --- the others' part ---------------------------------------------------------------------------------

    async def follow(self, last: float) -> bool:
        """Take steps under the head's orders up to `last`.

        True: that is the end; False: the head is lost, and this learner takes its place.
        """
        node = self.node
        while not self.leads:
            if self.members.changed or self.step >= last:
                if await self._let_go():
                    return True
            else:
                G = await self._mean()
                if G is not None and await self._ordered(G):
                    node.record(train_loss=G.loss)
                    node.publish(self.x, step=self.step)
                    if not self.held:
                        await node.save(**self.kept())
        return False

    async def model_of_step(self, k: int) -> Vector:
        """The head's model after step k. Raises PeerGone when the head is lost."""
        head = self.members.ids[0]
        m = await self.node.receive(Order, Gone, sender=head, epoch=self.epoch, step=k)
        if not isinstance(m, Order) or m.parameters is None:
            raise PeerGone(head)
        return m.parameters

    def _hear(self, m: Message | None) -> bool:
        """Take in a head's word or news of others; whether the site does not go on as it did."""
        epoch = self.epoch
        if isinstance(m, Sync) and self.members.counts(m, m.members, m.lives):
            self._adopt(m)
        self.members.hear(m)
        return self.members.changed or self.epoch != epoch

    async def _mean(self) -> GradientResult | None:
        """The next mean gradient; None where the site does not go on as it did."""
        computing = self.node.start(self.mean_gradient(self.x, self.step))
        while True:
            m = await self.node.first(computing, self.node.receive(Sync, *NEWS))
            if m is computing:
                value: GradientResult | None = computing.value
                return value
            if self._hear(m):
                computing.cancel()
                return None

    async def _ordered(self, G: GradientResult) -> bool:
        """Take in a mean gradient, and do with it what the head orders.

        False: the site does not go on as it did.
        """
        self.held.append(G)
        self.step += 1
        while True:
            order = self.node.receive(Order, epoch=self.epoch, step=self.step - 1)
            m = await self.node.first(order, self.node.receive(Sync, *NEWS))
            if isinstance(m, Order):
                self._carry_out(m)
                return True
            if self._hear(m):
                return False

    def _carry_out(self, order: Order) -> None:
        while len(self.held) > order.hold:
            self.apply_next()
        if order.parameters is not None:
            self.x = order.parameters

    def _adopt(self, m: Sync) -> None:
        self.members.adopt(m.members, m.lives)
        self.epoch, self.step = m.epoch, m.step
        self.x, self.state = m.parameters, m.state
        self.held = deque(GradientResult(gradient, 0.0) for gradient in m.held)

    async def _let_go(self) -> bool:
        """Say that the last order is carried out, until the head lets go. False: a loss or a return.

        After a loss wait for what the new head says. Whoever is let go tells the others: should the head be
        lost just now, nobody waits for who has left.
        """
        head = self.members.ids[0]
        if not self.members.changed:
            while self.held:
                self.apply_next()
            self.node.send(head, Done())
        while True:
            end = self.node.receive(End, sender=head)
            m = await self.node.first(end, self.node.receive(Sync, *NEWS))
            if isinstance(m, End):
                self._end_with(m)
                return True
            if self._hear(m):
                return False

    def _end_with(self, m: End) -> None:
        if m.parameters is not None:
            self.x = m.parameters
            self.node.publish(self.x, step=self.step)
        self.node.send(self.others, End(None))

    # --- after a return -------------------------------------------------------------------------------------

    async def come_back(self) -> bool:
        """After a return: be taken in again, or lead who stands outside as well. True: the site has ended."""
        node, members = self.node, self.members
        most = 4 * len(members.lives)  # a head gives all that it has to each
        members.ids = []
        node.send(members.living(), Return(self.step, True))
        told: dict[int, int] = {}  # lives of others that know that this one stands outside
        outside: dict[int, int] = {}  # steps of others, who said so when they knew
        while not self._begins(outside):
            m = await node.receive(End, Sync, *NEWS, timeout_s=patience_s(node, most))
            if m is None:
                node.send(members.living(), Return(self.step, False))
                members.go_alone()
                return False
            if isinstance(m, End) and m.sender in members.lives:
                self._end_with(m)
                return True
            self._hear(m)
            if members.ids:
                return False
            outside = {j: step for j, step in outside.items() if j in members.returned}
            if not isinstance(m, Return) or m.sender not in members.returned:
                continue
            if told.get(m.sender) != m.life:
                told[m.sender] = m.life
                node.send(m.sender, Return(self.step, True, m.life))
            if m.asked == node.life:
                outside[m.sender] = m.step
        members.ids, members.returned = [node.id], set(outside)
        return False

    def _begins(self, outside: Mapping[int, int]) -> bool:
        """Whether all who live stand outside, and this node is furthest of all, the lowest of several."""
        living = self.members.living()
        furthest = (self.step, -self.node.id)
        return set(living) <= outside.keys() and all((outside[j], -j) < furthest for j in living)


def heads(
    node: Node, sites: Sequence[int], size: int, left: Container[int], known: Mapping[int, int]
) -> list[int]:
    """The head of each of `sites`, where there is one.

    left: who is not to be asked. known: heads by site, as last heard; others are the lowest that live.
    """
    found = []
    for s in sites:
        living = [j for j in range(s * size, (s + 1) * size) if j not in left and node.fleet.alive(j)]
        found += [known[s]] if known.get(s) in living else living[:1]
    return found
