"""Patterns of messages of one size, timed: a method for measuring networks, not for training.

Node 0 conducts: it tells all which pattern comes, and notes when the last of them has received all that was
for it. So a measured time has two small messages in it, in virtual time as on a network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgefl.nodes import Message, Method, MethodConfig, Node

PATTERNS = ("one flow", "fan-in", "fan-out", "ring", "gossip")
CONDUCTOR = 0


class Flows(MethodConfig):
    sizes: tuple[int, ...] = (1_000_000,)
    """Bytes of a message."""
    repeats: int = 1


@dataclass(frozen=True)
class Begin(Message):
    turn: int


@dataclass(frozen=True)
class Block(Message):
    max_size = {"data": 100_000_000}
    turn: int
    data: torch.Tensor


@dataclass(frozen=True)
class Done(Message):
    turn: int


def turns(config: Flows) -> list[tuple[int, str, int]]:
    """(turn, pattern, bytes), in order."""
    cases = [(p, size) for size in config.sizes for _ in range(config.repeats) for p in PATTERNS]
    return [(turn, pattern, size) for turn, (pattern, size) in enumerate(cases)]


def receivers(node: Node, turn: int, pattern: str) -> list[list[int]]:
    """To whom each node sends, by sender."""
    everybody = list(node.fleet.ids())
    n = len(everybody)
    others: list[list[int]] = [[] for _ in everybody]
    if pattern == "one flow":
        a, b = node.shared_rng("pair", turn).choice(n, 2, replace=False)
        others[a] = [int(b)]
    elif pattern == "fan-in":
        others = [[] if i == CONDUCTOR else [CONDUCTOR] for i in everybody]
    elif pattern == "fan-out":
        others[CONDUCTOR] = [i for i in everybody if i != CONDUCTOR]
    elif pattern == "ring":
        others = [[(i + 1) % n] for i in everybody]
    else:
        steps = node.shared_rng("gossip", turn).integers(1, n, n)
        others = [[(i + int(step)) % n] for i, step in enumerate(steps)]
    return others


async def take_part(node: Node, turn: int, pattern: str, data: torch.Tensor) -> None:
    """Send what is this node's to send, and return when what is for it has come."""
    sends = receivers(node, turn, pattern)
    if sends[node.id]:
        node.send(sends[node.id], Block(turn, data))
    for _ in range(sum(ids.count(node.id) for ids in sends)):
        await node.receive(Block, turn=turn)


async def peer(node: Node) -> None:
    others = [i for i in node.fleet.ids() if i != CONDUCTOR]
    for turn, pattern, size in turns(node.config):
        data = torch.zeros(size, dtype=torch.uint8)
        if node.id != CONDUCTOR:
            await node.receive(Begin, turn=turn)
            await take_part(node, turn, pattern, data)
            await node.send(CONDUCTOR, Done(turn))
            continue
        began_s = node.now()
        node.send(others, Begin(turn))
        await take_part(node, turn, pattern, data)
        for _ in others:
            await node.receive(Done, turn=turn)
        node.record(**{f"{pattern}, {size / 1e6:g} MB": node.now() - began_s})


METHOD = Method(
    name="flows",
    title="Patterns of messages",
    paper="",
    roles={"peer": peer},
    messages=(Begin, Block, Done),
    ends_with=("peer",),
    needs="complete",
    evaluates="each",
    config=Flows,
)
