"""Two systems that cut a model: a pipeline, and split training of many clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgefl.learning.cost import Cost
from edgefl.learning.work import Call
from edgefl.nodes import Message, Node

# --- DAPPLE (Fan et al. 2021): pipeline stages in early-backward order


@dataclass(frozen=True)
class Activation(Message):
    micro: int
    values: Tensor


@dataclass(frozen=True)
class Gradient(Message):
    micro: int
    values: Tensor


def early_backward(stage: int, num_stages: int, num_micro: int) -> list[tuple[str, int]]:
    """Stage i runs S - i forwards, then one backward and one forward in turn, then the backwards left."""
    ahead = num_stages - stage
    order = [("forward", m) for m in range(ahead)]
    for m in range(num_micro):
        order.append(("backward", m))
        if m + ahead < num_micro:
            order.append(("forward", m + ahead))
    return order


async def dapple_stage(node: Node, num_stages: int, num_micro: int) -> tuple[int, float]:
    """Returns the most activations alive at once, and the sum of the gradients at its weight."""
    i, weight, slope = node.id, 2.0, 0.0
    live: dict[int, Tensor] = {}
    most = 0
    for phase, m in early_backward(i, num_stages, num_micro):
        if phase == "forward":
            x = (await node.receive(Activation, micro=m)).values if i else torch.tensor([m + 1.0])
            live[m] = x
            most = max(most, len(live))
            y = await node.compute(Call(torch.mul, (x, weight), Cost(seconds=1.0)))
            if i < num_stages - 1:
                node.send(i + 1, Activation(m, y))
        else:
            last = i == num_stages - 1
            g = torch.ones(1) if last else (await node.receive(Gradient, micro=m)).values
            x = live.pop(m)
            back = await node.compute(Call(torch.mul, (g, weight), Cost(seconds=2.0)))
            slope += float(g * x)
            if i:
                node.send(i - 1, Gradient(m, back))
    return most, slope


def check_dapple(results: Mapping[int, Any]) -> None:
    """The output is 2^4 times the input, so each weight's gradient is 2^3 times the sum of the inputs."""
    assert [results[i] for i in range(4)] == [(4 - i, 8.0 * sum(range(1, 17))) for i in range(4)]


# --- EdgeSplit (Zhang et al. 2022): split training of all clients at once; the toy model is y = r (f x)


@dataclass(frozen=True)
class Front(Message):
    round: int
    f: float


@dataclass(frozen=True)
class Smashed(Message):
    round: int
    batch: int
    h: float
    y: float


@dataclass(frozen=True)
class CutGradient(Message):
    round: int
    batch: int
    g: float


@dataclass(frozen=True)
class Trained(Message):
    round: int
    f: float


def error(r: float, h: float, y: float) -> float:
    return r * h - y


async def split_server(node: Node, rounds: int, num_batches: int, rate: float) -> float:
    clients = (1, 2)
    f = r = 1.0
    for t in range(rounds):
        parts = [node.start(rear(node, k, f, r, t, num_batches, rate)) for k in clients]
        ends = [await part for part in parts]
        f = sum(end[0] for end in ends) / len(ends)
        r = sum(end[1] for end in ends) / len(ends)
    return f * r


async def rear(
    node: Node, client: int, f: float, r: float, t: int, num_batches: int, rate: float
) -> tuple[float, float]:
    """One client's round at the server, with a rear of its own."""
    node.send(client, Front(t, f))
    for batch in range(num_batches):
        a = await node.receive(Smashed, sender=client, round=t, batch=batch)
        e = await node.compute(Call(error, (r, a.h, a.y), Cost(seconds=0.002)))
        node.send(client, CutGradient(t, batch, e * r))
        r = r - rate * e * a.h
    return (await node.receive(Trained, sender=client, round=t)).f, r


async def split_client(node: Node, num_batches: int, rate: float) -> None:
    x = 1 + 0.1 * node.id
    while True:
        m = await node.receive(Front)
        f = m.f
        for batch in range(num_batches):
            h = f * x
            node.send(m.sender, Smashed(m.round, batch, h, 2 * x))
            back = await node.receive(CutGradient, round=m.round, batch=batch)
            f = f - rate * back.g * x
        node.send(m.sender, Trained(m.round, f))


def check_edgesplit(results: Mapping[int, Any]) -> None:
    assert abs(results[0] - 2.0) < 1e-3
