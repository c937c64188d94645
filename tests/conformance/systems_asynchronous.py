"""Two asynchronous systems: a buffering server, and groups that a generator draws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgefl.learning.cost import Cost
from edgefl.learning.work import Call
from edgefl.nodes import Message, Node
from edgefl.patterns.all_reduce import ring_all_reduce

# --- FedBuff (Nguyen et al. 2022): a server that flushes a buffer of K updates, whoever they came from


@dataclass(frozen=True)
class Job(Message):
    version: int
    w: Tensor


@dataclass(frozen=True)
class Delta(Message):
    version: int
    values: Tensor


def approach(w: Tensor, target: float) -> Tensor:
    """Local training: a tenth of the way to this client's optimum."""
    return w + 0.1 * (target - w)


async def fedbuff_server(node: Node, buffer_size: int, num_updates: int) -> tuple[list[float], int]:
    w, version, buffer = torch.zeros(3), 0, []
    node.send((1, 2, 3, 4), Job(version, w))
    for _ in range(num_updates):
        u = await node.receive(Delta)
        buffer.append(u.values / math.sqrt(1 + version - u.version))
        if len(buffer) == buffer_size:
            w, version, buffer = w + sum(buffer) / buffer_size, version + 1, []
        node.send(u.sender, Job(version, w))
    return w.tolist(), version


async def fedbuff_client(node: Node) -> None:
    while True:
        m = await node.receive(Job)
        y = await node.compute(Call(approach, (m.w, 10.0 * node.id), Cost(seconds=0.01 * node.id)))
        node.send(m.sender, Delta(m.version, y - m.w))


def check_fedbuff(results: Mapping[int, Any]) -> None:
    w, version = results[0]
    assert version == 40 // 4
    assert w[0] == w[1] == w[2] and 0 < w[0] < 40  # between the start and the farthest optimum


# --- Prague (Luo et al. 2020): a generator draws groups of workers that all-reduce among themselves


@dataclass(frozen=True)
class Request(Message):
    step: int


@dataclass(frozen=True)
class Group(Message):
    number: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Done(Message):
    number: int


async def group_generator(node: Node, workers: tuple[int, ...], size: int, gap: int, steps: int) -> None:
    """Smart groups: divide all who are free and at most `gap` steps behind; start a group when all ask."""
    requests = dict.fromkeys(workers, 0)
    assigned: dict[int, int] = {}  # worker -> its group
    groups: dict[int, list[int]] = {}
    asking: set[int] = set()
    drawn = 0
    while any(count < steps for count in requests.values()) or groups:
        m = await node.receive(Request, Done)
        if isinstance(m, Done):
            groups[m.number].remove(m.sender)
            del assigned[m.sender]
            if not groups[m.number]:
                del groups[m.number]
            continue
        i = m.sender
        requests[i] += 1
        asking.add(i)
        if i not in assigned:
            free = [w for w in workers if w not in assigned and (w in asking or requests[w] < steps)]
            near = [w for w in free if w == i or requests[i] - requests[w] < gap]
            node.rng("division", drawn).shuffle(near)
            for part in np.array_split(near, max(1, round(len(near) / size))):
                groups[drawn] = [int(w) for w in part]
                assigned.update(dict.fromkeys(groups[drawn], drawn))
                drawn += 1
        members = groups[assigned[i]]
        if asking.issuperset(members):
            asking.difference_update(members)
            node.send(members, Group(assigned[i], tuple(members)))


async def prague_worker(node: Node, generator: int, steps: int) -> list[float]:
    x = torch.full((6,), float(node.id))
    for step in range(steps):
        await node.compute(Call(abs, (0,), Cost(seconds=0.05 if node.id == 0 else 0.01)))
        node.send(generator, Request(step))
        g = await node.receive(Group, sender=generator)
        x = await ring_all_reduce(node, g.members, x, tag=g.number) / len(g.members)
        node.send(generator, Done(g.number))
    return x.tolist()


def check_prague(results: Mapping[int, Any]) -> None:
    models = np.array([results[i] for i in range(8)])
    assert np.allclose(models.mean(0), 3.5, atol=1e-5)  # no training: every group keeps the mean
    assert np.ptp(models, axis=0).max() < 0.5 * 7
