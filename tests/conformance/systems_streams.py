"""Two synchronous systems that exchange after each step: kernels on streams, and policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgefl.learning.cost import Cost
from edgefl.learning.work import Call
from edgefl.nodes import Message, Node
from edgefl.patterns.gather import gather

# --- DOMKL (Chae and Hong 2021): learners on streams of data that agree with their neighbors (online ADMM)


@dataclass(frozen=True)
class Theta(Message):
    round: int
    values: Tensor


TRUTH = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.float64)


def sample(node: int, t: int) -> tuple[float, Tensor, float]:
    """The t-th sample of a learner's stream: when it arrives, unit input z, label."""
    z = torch.from_numpy(np.random.default_rng([node, t]).normal(size=4))
    z = z / z.norm()
    return 0.005 * t, z, float(z @ TRUTH)


async def domkl_learner(node: Node, n: int, rounds: int, eta: float, rho: float) -> tuple[Any, Any]:
    neighbors = ((node.id - 1) % n, (node.id + 1) % n)
    theta, dual = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    theirs = dict.fromkeys(neighbors, theta)
    for t in range(rounds):
        arrives_s, z, y = sample(node.id, t)
        await node.sleep(max(0.0, arrives_s - node.now()))
        a = eta + rho * len(neighbors)
        b = eta * theta + rho * sum((theta + theirs[j]) / 2 for j in neighbors) - dual
        theta = b / a + 2 / (a + 2) * (y - z @ b / a) * z
        node.send(neighbors, Theta(t, theta))
        async for m in gather(node, Theta, neighbors, round=t):
            theirs[m.sender] = m.values
        dual = dual + rho / 2 * sum(theta - theirs[j] for j in neighbors)
    return theta.tolist(), dual.tolist()


def check_domkl(results: Mapping[int, Any]) -> None:
    thetas, duals = (np.array([results[i][part] for i in range(5)]) for part in range(2))
    assert np.abs(thetas - TRUTH.numpy()).max() < 0.01
    assert np.abs(duals.sum(0)).max() < 1e-9  # what one adds its neighbor takes away


# --- DARL1N (Wang et al. 2022): a controller hands all policies out, each learner improves its own


@dataclass(frozen=True)
class Policies(Message):
    round: int
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class Policy(Message):
    round: int
    values: Tensor


def collect(policies: tuple[Tensor, ...]) -> Tensor:
    """One-hop transitions: the toy's only depend on what all do on average."""
    return torch.stack(policies).mean(0)


def improve(policy: Tensor, transitions: Tensor) -> Tensor:
    return policy + transitions + 1


async def darl1n_controller(node: Node, iterations: int) -> list[list[float]]:
    learners = (1, 2, 3)
    policies = dict.fromkeys(learners, torch.zeros(2))
    for t in range(iterations):
        node.send(learners, Policies(t, tuple(policies[i] for i in learners)))
        async for m in gather(node, Policy, learners, round=t):
            policies[m.sender] = m.values
    return [policies[i].tolist() for i in learners]


async def darl1n_learner(node: Node) -> None:
    while True:
        m = await node.receive(Policies)
        transitions = await node.compute(Call(collect, (m.values,), Cost(seconds=0.01)))
        own = m.values[node.id - 1]
        better = await node.compute(Call(improve, (own, transitions), Cost(seconds=0.01)))
        node.send(m.sender, Policy(m.round, better))


def check_darl1n(results: Mapping[int, Any]) -> None:
    assert results[0] == [[15.0, 15.0]] * 3  # x <- 2 x + 1, four times from 0
