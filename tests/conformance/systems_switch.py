"""A switch with few slots that adds packets which may be lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgefl.nodes import Message, Node

# --- SwitchML (Sapio et al. 2021): a switch with few slots adds packets that may be lost


@dataclass(frozen=True)
class Packet(Message):
    lossy = True
    index: int
    values: Tensor


@dataclass(frozen=True)
class Sum(Message):
    lossy = True
    index: int
    values: Tensor


class Slot:
    """One place of the switch: the packet that it adds up, and from whom it has it."""

    def __init__(self) -> None:
        self.index, self.seen, self.total = -1, set[int](), torch.zeros(0)


async def switch(node: Node, workers: tuple[int, ...], num_slots: int) -> None:
    """Two versions of each slot: a worker that is in the next version has the sum of the one before."""
    slots = {(version, place): Slot() for version in range(2) for place in range(num_slots)}
    while True:
        p = await node.receive(Packet)
        slot = slots[p.index // num_slots % 2, p.index % num_slots]
        if p.index < slot.index:
            continue
        if p.index > slot.index:
            slot.index, slot.seen, slot.total = p.index, set(), torch.zeros_like(p.values)
        if p.sender not in slot.seen:
            slot.seen.add(p.sender)
            slot.total = slot.total + p.values
            if len(slot.seen) == len(workers):
                node.send(workers, Sum(p.index, slot.total))
        elif len(slot.seen) == len(workers):
            node.send(p.sender, Sum(p.index, slot.total))  # its copy of the sum was lost


async def switch_worker(node: Node, aggregator: int, slots: int, repeats: int) -> list[list[float]]:
    parts = torch.split(own_integers(node.id), 8)
    totals = []
    for k in range(repeats):
        sums = await switch_all_reduce(node, aggregator, parts, slots, base=k * len(parts))
        totals.append(torch.cat(sums).tolist())
    return totals


async def switch_all_reduce(
    node: Node, aggregator: int, parts: tuple[Tensor, ...], slots: int, base: int
) -> list[Tensor]:
    """The sums of all workers' parts; a packet whose sum does not come in 50 ms goes again."""
    sums: dict[int, Tensor] = {}
    due: dict[int, float] = {}

    def push(c: int) -> None:
        node.send(aggregator, Packet(base + c, parts[c]))
        due[c] = node.now() + 0.05

    for c in range(min(slots, len(parts))):
        push(c)
    while due:
        m = await node.receive(Sum, timeout_s=max(0.0, min(due.values()) - node.now()))
        if m is None:
            for c in [c for c in due if due[c] <= node.now()]:
                push(c)
        elif m.index - base in due:
            c = m.index - base
            sums[c] = m.values
            del due[c]
            if c + slots < len(parts):
                push(c + slots)
    return [sums[c] for c in range(len(parts))]


def own_integers(node: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(node).integers(-99, 99, 103).astype(np.float32))


def check_switchml(results: Mapping[int, Any]) -> None:
    exact = sum(own_integers(i) for i in range(4)).tolist()
    assert all(results[i] == [exact] * 3 for i in range(4))
