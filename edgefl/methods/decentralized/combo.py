"""Combo: segmented gossip (Hu, Jiang, Wang 2019, https://arxiv.org/abs/1908.07782).

W: a worker's model, flat, in S contiguous segments W[0] .. W[S-1], the last with the remainder; R: replicas;
|D_i|: examples of worker i. Round t of worker i: local training (E epochs or tau steps, [train]); publish the
result as snapshot W_i^t; for each segment l pull W_j^t[l] from R different peers j in P_l, all S R pulls at
once; W_i[l] <- (|D_i| W_i^t[l] + sum_j |D_j| W_j^t[l]) / (|D_i| + sum_j |D_j|), summed by ascending id.
Choices: peers are dealt from shuffled passes over the peer list, so that S R <= n - 1 pulls go to distinct
peers. Rounds are logical: a pull for round t is answered from snapshot t, one that comes early when that is
published; there is no barrier. Snapshots are kept until every living peer has pulled for a later round, at
most `snapshots`; a pull for one that was dropped is answered from the oldest and counted. No timer runs
against a live peer: it may be training. A pull to a peer that is gone goes to another one outside P_l, and
where none is left the mean is over what there is. A worker that returns goes on from the snapshot of a
random peer, in that peer's round; since others may have ended, its own pulls are given up after a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from edgefl.errors import ConfigError
from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Faults, Gone, Message, Method, MethodConfig, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.parameters.packing import pack, segment_bounds, unpack
from edgefl.patterns.farewell import Finished, Leaving, patience_s, until_all_finish
from edgefl.patterns.reports import ALL_FINITE, answers


class ComboConfig(MethodConfig):
    """S and R; local training is [train]'s."""

    segments: int = Field(default=10, ge=1)
    """S: contiguous parts of the model that are pulled from different peers."""
    replicas: int = Field(default=2, ge=1)
    """R: peers that each segment is pulled from, below the number of workers."""
    snapshots: int = Field(default=8, ge=1)
    """Most snapshots that a worker keeps for peers in earlier rounds."""


@dataclass(frozen=True)
class Pull(Message):
    round: int
    segment: int


@dataclass(frozen=True)
class Segment(Message):
    """The answer to a pull; num_examples: |D_j| of its sender."""

    stale_by = "round"
    round: int
    segment: int
    num_examples: int
    values: Tensor


@dataclass(frozen=True)
class Hello(Message):
    """A worker that was gone is back and has no model of this time."""


@dataclass(frozen=True)
class Snapshot(Message):
    """The answer to Hello: the newest W_j^t."""

    round: int
    parameters: Vector


def deal(rng: np.random.Generator, peers: Sequence[int], S: int, R: int) -> list[list[int]]:
    """P_0 .. P_{S-1}: R different peers each, ascending; all S R distinct where there are so many.

    Dealt from shuffled passes over `peers`; a peer that the segment already has is kept for a later one.
    """
    deck: list[int] = []
    hands: list[list[int]] = []
    for _ in range(S):
        hand: list[int] = []
        while len(hand) < min(R, len(peers)):
            at = next((i for i, j in enumerate(deck) if j not in hand), None)
            if at is None:
                deck += [int(j) for j in rng.permutation(np.asarray(peers))]
            else:
                hand.append(deck.pop(at))
        hands.append(sorted(hand))
    return hands


class Desk:
    """A worker's snapshots, and the pulls that wait for one."""

    def __init__(self, node: Node) -> None:
        self.node, self.most = node, node.config.snapshots
        self.kept: dict[int, tuple[Vector, Tensor]] = {}
        self.early: list[Pull | Hello] = []
        self.heard = dict.fromkeys((j for j in node.fleet.ids() if j != node.id), -1)
        """The latest round that each peer has pulled for."""

    def publish(self, t: int, W: Vector) -> None:
        """Snapshot t is W: answer those who wait for it, and drop what nobody needs."""
        self.kept[t] = (W, pack(W))
        early, self.early = self.early, []
        for m in early:
            self.answer(m)
        needed = min((s for j, s in self.heard.items() if self.node.fleet.alive(j)), default=t)
        for s in sorted(self.kept)[:-1]:
            if s < needed or len(self.kept) > self.most:
                del self.kept[s]

    def answer(self, m: Pull | Hello) -> None:
        """Answer now, or when the snapshot that it asks for is there."""
        newest = max(self.kept, default=-1)
        if newest < (m.round if isinstance(m, Pull) else 0):
            self.early.append(m)
        elif isinstance(m, Hello):
            self.node.send(m.sender, Snapshot(newest, self.kept[newest][0]))
        else:
            self.heard[m.sender] = max(self.heard[m.sender], m.round)
            held = m.round if m.round in self.kept else min(self.kept)
            if held != m.round:
                self.node.record(pulls_of_dropped_rounds=1)
            packed = self.kept[held][1]
            begin, end = segment_bounds(len(packed), self.node.config.segments)[m.segment]
            size = self.node.fleet.num_examples(self.node.id)
            self.node.send(m.sender, Segment(m.round, m.segment, size, packed[begin:end]))

    async def serve(self) -> None:
        while True:
            self.answer(await self.node.receive(Pull, Hello))


async def worker(node: Node) -> Vector:
    assert node.data is not None
    saved = node.saved or {"x": node.model.init(), "round": 0, "state": None}
    x: Vector = saved["x"]
    first, state = saved["round"], saved["state"]
    peers = {j for j in node.fleet.ids() if j != node.id}
    desk = Desk(node)
    node.start(desk.serve())
    mine = None  # this round's snapshot where it came from a peer
    if node.life > 0 and (welcome := await _welcomed(node, peers)) is not None:
        first, mine = welcome.round, welcome.parameters
    for t in node.rounds(first):
        if mine is None:
            r: Trained = await node.compute(LocalSGD(x, node.data, t, node.workload, state=state))
            mine, state = r.parameters, r.state
            node.record(round=t, train_loss=r.loss)
        desk.publish(t, mine)
        x, mine = await _pulled(node, peers, t, mine), None
        node.publish(x, step=t + 1)
        await node.save(x=x, round=t + 1, state=state)
    await until_all_finish(node, peers, timeout_s=_patience_s(node))
    return x


async def _pulled(node: Node, peers: set[int], t: int, x: Vector) -> Vector:
    """The mean by segment of x and of what R peers each have of it; who leaves is taken off `peers`."""
    S, R = node.config.segments, node.config.replicas
    P = deal(node.rng("peers", t), _living(node, peers), S, R)
    waiting = {(l, j) for l in range(S) for j in P[l]}
    for l, j in sorted(waiting):
        node.send(j, Pull(t, l))
    got: dict[tuple[int, int], Segment] = {}
    while waiting:
        asked = {j for _, j in waiting}
        answer = node.receive(Segment, Gone, sender=asked, round=t)
        m = await node.first(answer, node.receive(Leaving, sender=asked), timeout_s=_patience_s(node))
        if m is None:
            break
        if isinstance(m, Segment):
            got[m.segment, m.sender] = m
            waiting.discard((m.segment, m.sender))
            continue
        if isinstance(m, Leaving):
            peers.discard(m.sender)
        for l in [l for l, j in sorted(waiting) if j == m.sender]:
            waiting.discard((l, m.sender))
            others = [j for j in _living(node, peers) if j not in P[l]]
            if others:
                j = int(node.rng("replacement", t, l, m.sender).choice(others))
                P[l].append(j)
                waiting.add((l, j))
                node.send(j, Pull(t, l))
    return average(x, node.id, node.fleet.num_examples(node.id), S, got)


def _living(node: Node, peers: set[int]) -> list[int]:
    return list(node.fleet.living(sorted(peers)))


def average(x: Vector, own: int, size: int, S: int, got: dict[tuple[int, int], Segment]) -> Vector:
    """W[l] for each l: the mean of x's and of got[l, j], weighted by examples, summed by ascending id."""
    packed = pack(x)
    mixed = packed.clone()
    for l, (begin, end) in enumerate(segment_bounds(len(packed), S)):
        parts = {j: (m.values, m.num_examples) for (k, j), m in got.items() if k == l}
        if not parts:
            continue
        parts[own] = (packed[begin:end], size)
        total = torch.zeros(end - begin, dtype=torch.float64)
        for j in sorted(parts):
            total.add_(parts[j][0], alpha=parts[j][1])
        mixed[begin:end] = total / sum(n for _, n in parts.values())
    return unpack(mixed, x)


async def _welcomed(node: Node, peers: set[int]) -> Snapshot | None:
    """The newest snapshot of a random living peer; None where nobody answers."""
    for j in node.rng("welcome", node.life).permutation(_living(node, peers)):
        node.send(int(j), Hello())
        m = await node.receive(Snapshot, Gone, sender=int(j), timeout_s=_patience_s(node))
        if isinstance(m, Snapshot):
            return m
    return None


def _patience_s(node: Node) -> float | None:
    """Without end in a first life: a peer answers, or is gone, or says that it leaves."""
    return patience_s(node, node.config.replicas) if node.life > 0 else None


def _refuse_impossible(plan: RunPlan) -> None:
    assert plan.learner is not None
    config, n, d = plan.config, len(plan.nodes), len(pack(plan.learner.model.init()))
    if n > 1 and config.replicas > n - 1:
        raise ConfigError("method.combo.replicas", config.replicas, f"at most {n - 1} with {n} workers")
    if config.segments > d:
        raise ConfigError("method.combo.segments", config.segments, f"at most {d}, the model's values")


METHOD = Method(
    name="combo",
    title="Segmented gossip",
    paper="Hu, Jiang, Wang 2019, https://arxiv.org/abs/1908.07782",
    roles={"worker": worker},
    messages=(Pull, Segment, Hello, Snapshot, Finished, Leaving),
    config=ComboConfig,
    ends_with=("worker",),
    needs="complete",
    evaluates="each",
    prepare=_refuse_impossible,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(ALL_FINITE, answers(Pull, Segment)),
)
