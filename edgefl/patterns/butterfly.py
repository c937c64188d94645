"""Butterfly all-reduce in a group: member j reduces part j of the vector, and survives who vanishes.

All send part j to member j, who averages what it hears and returns to each sender the difference to what
that one sent. The parts' sizes follow the members' bandwidths.
Source: Moshpit SGD (Ryabinin et al. 2021, https://arxiv.org/abs/2103.03239) and hivemind's load balancing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.nodes import Gone, Message, Node


@dataclass(frozen=True)
class Part(Message):
    """A member's values of the part that the receiver reduces. group: which all-reduce."""

    newest_by = ("sender",)
    group: int
    weight: float
    values: Tensor


@dataclass(frozen=True)
class Difference(Message):
    """The mean of a part less what the receiver had sent of it."""

    newest_by = ("sender",)
    group: int
    values: Tensor


def load_split(bandwidths: Sequence[float]) -> list[float]:
    """The share w_i of the vector that each member reduces, so that the slowest is done soonest.

    bandwidths: b_i >= 0 in any unit; a member with 0 only sends and takes no share; not all are 0. The time
    is T = max over b_i > 0 of (1 + (g-2) w_i) / b_i, g members; its least value is max(1/b_i) or where
    sum_i clip((T b_i - 1) / (g-2), 0, 1) = 1, whichever is larger. Returns those clipped terms over their
    sum; for two members w is proportional to b.
    Source: closed form of the linear program that hivemind solves.

    >>> load_split([1, 2, 3, 4])
    [0.0, 0.2, 0.4, 0.4]
    """
    g = len(bandwidths)
    if g == 1:
        return [1.0]
    if g == 2:
        return [b / sum(bandwidths) for b in bandwidths]
    T = max(1 / b for b in bandwidths if b > 0)
    if sum(_clipped(T, bandwidths)) < 1:
        T = _time_that_shares_all(bandwidths, T)
    shares = _clipped(T, bandwidths)
    return [w / sum(shares) for w in shares]


def _clipped(T: float, bandwidths: Sequence[float]) -> list[float]:
    g = len(bandwidths)
    return [min(max((T * b - 1) / (g - 2), 0.0), 1.0) for b in bandwidths]


def _time_that_shares_all(bandwidths: Sequence[float], least: float) -> float:
    """T at which the clipped shares sum to 1: their sum is piecewise linear in T, with known corners."""
    g = len(bandwidths)
    corners = sorted({(1 + (g - 2) * w) / b for b in bandwidths if b > 0 for w in (0, 1)} | {least})
    below = least
    for corner in corners:
        if sum(_clipped(corner, bandwidths)) >= 1:
            low, high = sum(_clipped(below, bandwidths)), sum(_clipped(corner, bandwidths))
            return below + (1 - low) / (high - low) * (corner - below) if high > low else corner
        below = max(below, corner)
    return below


def split_time_s(bandwidths: Sequence[float], shares: Sequence[float], size_bytes: float) -> float:
    """Seconds of the slowest member: size (1 + (g-2) w_i) / b_i, over those with b_i > 0."""
    g = len(bandwidths)
    each = [(1 + (g - 2) * w) / b for b, w in zip(bandwidths, shares, strict=True) if b > 0]
    return size_bytes * max(each)


def part_bounds(size: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Contiguous parts in member order, whose sizes follow the shares by largest remainder.

    >>> part_bounds(10, [0.25, 0.25, 0.5])
    [(0, 3), (3, 5), (5, 10)]
    """
    exact = [size * w for w in shares]
    sizes = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (sizes[i] - exact[i], i))
    for i in by_remainder[: size - sum(sizes)]:
        sizes[i] += 1
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


async def butterfly_mean(
    node: Node,
    members: Sequence[int],
    values: Tensor,
    shares: Sequence[float],
    *,
    group: int,
    timeout_s: float,
    weight: float = 1.0,
) -> Tensor:
    """The weighted mean of the members' `values`, part by part, over those whom each reducer has heard.

    members, shares, group: the same at all. values: (d,). timeout_s: how long a member's part, and then a
    reducer's answer, is waited for; one that is gone is given up at once. Returns (d,): a part whose reducer
    is lost keeps this node's values. With equal shares each member sends 2 (g-1) / g x d values.
    """
    end_s = node.now() + 2 * timeout_s
    bounds = dict(zip(members, part_bounds(len(values), shares), strict=True))
    reducers = [j for j in members if j != node.id and bounds[j][0] < bounds[j][1]]
    for j in reducers:
        node.send(j, Part(group, weight, values[slice(*bounds[j])]))
    result = values.clone()
    begin, end = bounds[node.id]
    if begin < end:
        mine = values[begin:end]
        mean = await _reduce(node, members, mine, weight, group, timeout_s)
        result[begin:end] = mean
    waiting = set(reducers)
    while waiting:
        left_s = end_s - node.now()
        m = await node.receive(Difference, Gone, sender=waiting, timeout_s=left_s, group=group)
        if m is None:
            break
        waiting.discard(m.sender)
        if isinstance(m, Difference):
            place = slice(*bounds[m.sender])
            result[place] = values[place] + m.values
    return result


async def _reduce(
    node: Node, members: Sequence[int], mine: Tensor, weight: float, group: int, timeout_s: float
) -> Tensor:
    """The mean of a part over those heard in time, in member order; each sender gets its difference."""
    heard = {node.id: (mine, weight)}
    waiting = set(members) - {node.id}
    end_s = node.now() + timeout_s
    while waiting:
        left_s = end_s - node.now()
        m = await node.receive(Part, Gone, sender=waiting, timeout_s=left_s, group=group)
        if m is None:
            break
        waiting.discard(m.sender)
        if isinstance(m, Part):
            heard[m.sender] = (m.values, m.weight)
    total = torch.zeros(len(mine), dtype=torch.float64)
    for j in members:
        if j in heard:
            total.add_(heard[j][0], alpha=heard[j][1])
    mean = (total / sum(w for _, w in heard.values())).to(mine.dtype)
    for j, (values, _) in heard.items():
        if j != node.id:
            node.send(j, Difference(group, mean - values))
    return mean
