"""[compress], between a method's client and its server: the one place where updates become smaller.

Sources: error feedback, Stich et al. 2018 (https://arxiv.org/abs/1809.07599), with the rate inside the
memory: u = change + e, send C(u), e <- u - C(u). Choice: what was sent and did not count goes back, e <- u;
what counts is known when the next model comes, which says which of the client's updates counted last.
Differences to a copy that both ends hold need no memory: what was not sent is in the next difference
(CHOCO-SGD, https://arxiv.org/abs/1902.00340), as long as compressing is contractive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from edgefl.nodes import Message, Node
from edgefl.parameters import Layout, Vector
from edgefl.parameters.compress import CompressConfig, Packed

Sent = Vector | Packed
"""A model or a change as it is, or a change packed as [compress] says."""


class Uplink:
    """A client's side: packs what it sends, and remembers what it did not send.

    memory: e, (P,) of the whole model, None while nothing is kept. Saved with the client's state, so that it
    outlives a crash; a client that lost it starts with none, and that part of its change is gone.
    index: where the values of a sub-model lie in the whole one; what was not sent of one waits there until an
    update has that place again.
    """

    def __init__(self, node: Node) -> None:
        saved = node.saved or {}
        self._node = node
        self.memory: Tensor | None = saved.get("memory")
        self._whole: Tensor | None = saved.get("whole")
        self._tag: int = saved.get("tag", -1)

    def settle(self, counted: int) -> None:
        """Hear which update counted last: one that was sent later goes back into memory."""
        if self._whole is not None and counted < self._tag:
            self.memory = self._whole
        self._whole = None

    def model(self, y: Vector, start: Vector, tag: int, index: Tensor | None = None) -> Sent:
        """A model to send: itself, or its packed change from where it started. tag: rises by update."""
        return self.change(y - start, tag, index) if self._node.compress.on else y

    def change(self, change: Vector, tag: int, index: Tensor | None = None) -> Sent:
        """A change to send: itself, or packed."""
        compress = self._node.compress
        if not compress.on:
            return change
        u, e = change.values, self.memory
        if e is not None:
            u = u + (e if index is None else e[index])
        packed = compress.pack(u, self._node.rng("compress", tag))
        if compress.remembers:
            rest = u - compress.unpack(packed, len(u))
            if index is not None:
                e = torch.zeros(self._node.model.layout.size) if e is None else e
                u, rest = e.index_copy(0, index, u), e.index_copy(0, index, rest)
            self._remember(u, rest, tag)
        return (*packed, *change.buffers)

    def _remember(self, u: Tensor, rest: Tensor, tag: int) -> None:
        finite = bool(torch.isfinite(u).all())  # a change that is no number is not worth keeping
        self.memory, self._whole, self._tag = (rest, u, tag) if finite else (None, None, tag)

    async def save(self, **more: Any) -> None:
        """Save the memory, and `more` of the client's state, where there is something to keep."""
        if self._node.compress.remembers or more:
            await self._node.save(memory=self.memory, whole=self._whole, tag=self._tag, **more)


class Counted:
    """A server's side: the round of each client's last report that counted, where [compress] remembers."""

    def __init__(self, node: Node, saved: Mapping[int, int]) -> None:
        """saved: as `state` gave it."""
        self._node, self._rounds = node, dict(saved)

    def of(self, k: int) -> int:
        """That of client k; -1: none, or nothing is remembered."""
        return self._rounds.get(k, -1)

    def send(self, cohort: Sequence[int], message: Callable[[int], Message]) -> None:
        """Send each what `message` makes of its round: one payload to all where nothing is remembered."""
        if self._node.compress.remembers:
            for k in cohort:
                self._node.send(k, message(self.of(k)))
        else:
            self._node.send(cohort, message(-1))

    def add(self, clients: Sequence[int], t: int) -> None:
        """The reports of these have counted in round t."""
        if self._node.compress.remembers:
            self._rounds |= dict.fromkeys(clients, t)

    def state(self) -> dict[int, int]:
        """What a server saves."""
        return dict(self._rounds)


def bare(sent: Sent) -> Tensor | Packed:
    """What is sent of a sub-model: its receiver knows the layout, which messages are not checked against."""
    return sent.values if isinstance(sent, Vector) else sent


def opened(node: Node, sent: Sent, layout: Layout) -> Vector:
    """What was sent, as a vector. Raises ValueError for what does not fit the layout."""
    if isinstance(sent, Vector):
        if sent.layout is not layout and sent.layout != layout:
            raise ValueError("it has another layout than the model")
        return sent
    if not node.compress.on:
        raise ValueError("it is packed, and this run compresses nothing")
    buffers = sent[2:]
    if [(b.dtype, tuple(b.shape)) for b in buffers] != [(b.dtype, b.shape) for b in layout.buffers]:
        raise ValueError("its buffers are not the model's")
    return Vector(layout, node.compress.unpack(sent, layout.size), tuple(buffers))


def packed_difference(node: Node, difference: Vector, tag: int) -> Sent:
    """A difference to a copy that both ends hold, to send: itself, or packed without memory.

    tag: rises by difference. What it adds to the copy, at either end: contracted(opened(...)).
    """
    if not node.compress.on:
        return difference
    return (*node.compress.pack(difference.values, node.rng("compress difference", tag)), *difference.buffers)


def contracted(compress: CompressConfig, q: Vector) -> Vector:
    """q, or for a quantiser q / (1 + omega): its variance bound omega = min(b / s^2, sqrt(b) / s) scales it
    so that a copy comes nearer with each difference."""
    if compress.name != "qsgd":
        return q
    b, s = compress.bucket, compress.levels
    return q.with_values(q.values / (1 + min(b / s**2, math.sqrt(b) / s)))
