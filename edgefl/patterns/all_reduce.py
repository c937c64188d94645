"""Ring all-reduce over any ordered list of members: reduce-scatter, then all-gather.

Source: Patarasuk and Yuan 2009 (bandwidth optimal all-reduce); chunks and steps as stated below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.errors import PeerGone
from edgefl.nodes import Gone, Message, Node, Op
from edgefl.parameters import Vector
from edgefl.parameters.packing import pack, unpack


class CalledOff(PeerGone):
    """An operation was called off by `message`."""

    def __init__(self, message: Message) -> None:
        super().__init__(message.sender)
        self.message = message


@dataclass(frozen=True)
class Chunk(Message):
    """tag: which all-reduce; step: 0 .. 2(n-1) - 1; values: one chunk, possibly empty."""

    tag: int
    step: int
    values: Tensor


def chunk_bounds(size: int, num_chunks: int) -> list[tuple[int, int]]:
    """Where each chunk begins and ends: entries floor(c size/n) to floor((c+1) size/n) - 1.

    >>> chunk_bounds(5, 3)
    [(0, 1), (1, 3), (3, 5)]
    """
    return [(c * size // num_chunks, (c + 1) * size // num_chunks) for c in range(num_chunks)]


async def ring_all_reduce(
    node: Node, members: Sequence[int], values: Tensor, *, tag: int, unless: Sequence[Op[Message]] = ()
) -> Tensor:
    """The sum over `members` of their `values`, bit-equal at all of them.

    members: node ids in ring order, this one among them, the same list at all. values: (d,), the same
    d at all; any d, also one that len(members) does not divide. tag: the same at all members of one
    operation, and used once per pair of neighbors. unless: receives whose message calls it off. Returns a
    new (d,) tensor; equal to the plain sum to rounding. 2(n-1) steps; all members together send 2(n-1) d
    values.
    Raises PeerGone when the member before this one is gone, CalledOff with what called it off; the caller
    starts anew with the survivors.
    """
    n, r = len(members), members.index(node.id)
    right, left = members[(r + 1) % n], members[r - 1]
    chunks = chunk_bounds(len(values), n)
    total = values.clone()
    for step in range(2 * (n - 1)):
        begin, end = chunks[(r - step) % n]
        node.send(right, Chunk(tag, step, total[begin:end].clone()))
        came = node.receive(Chunk, Gone, sender=left, tag=tag, step=step)
        m: Message = await (node.first(came, *unless) if unless else came)
        if isinstance(m, Gone) and m.sender == left:
            raise PeerGone(left)
        if not isinstance(m, Chunk):
            raise CalledOff(m)
        begin, end = chunks[(r - step - 1) % n]
        if step < n - 1:
            total[begin:end] += m.values
        else:
            total[begin:end] = m.values
    return total


async def all_reduce_mean(
    node: Node,
    members: Sequence[int],
    vector: Vector,
    *,
    weight: float | None = 1.0,
    tag: int,
    unless: Sequence[Op[Message]] = (),
) -> Vector:
    """The weighted mean over `members` of their vectors, bit-equal at all of them.

    The weight travels as one more value behind the parameters; None at all members: all weigh the same, and
    nothing but the parameters travels. A group of one returns its own vector bit for bit.
    Floating-point buffers travel along; integer ones stay each node's own. unless: as in ring_all_reduce.
    Raises ValueError when the weights sum to zero.
    """
    if len(members) == 1:
        return vector
    packed = pack(vector)
    if weight is None:
        total = await ring_all_reduce(node, members, packed, tag=tag, unless=unless)
        return unpack(total / len(members), vector)
    packed = torch.cat([packed * weight, packed.new_tensor([weight])])
    total = await ring_all_reduce(node, members, packed, tag=tag, unless=unless)
    if total[-1] == 0:
        raise ValueError("the weights of an all-reduce sum to zero")
    return unpack(total[:-1] / total[-1], vector)
