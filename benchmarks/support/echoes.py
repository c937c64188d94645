"""A method that sends arrays to a client and takes them back, and says how long that took."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.nodes import Message, Method, MethodConfig, Node

SIZES = {"1 MB": 250_000, "100 MB": 25_000_000}


@dataclass(frozen=True)
class Arrays(Message):
    """Values, there and back."""

    max_size = {"values": 25_000_000}
    values: Tensor


async def server(node: Node) -> dict[str, list[float]]:
    (client,) = node.fleet.ids("client")
    found: dict[str, list[float]] = {name: [] for name in SIZES}
    for _ in node.rounds():
        for name, size in SIZES.items():
            values = torch.ones(size)
            start_s = node.now()
            node.send(client, Arrays(values))
            back = await node.receive(Arrays)
            found[name].append(node.now() - start_s)
            assert back.values.numel() == size
    return found


async def client(node: Node) -> None:
    while True:
        m = await node.receive(Arrays)
        node.send(m.sender, Arrays(m.values))


METHOD = Method(
    name="echoes",
    title="Arrays there and back",
    paper="",
    roles={"server": server, "client": client},
    messages=(Arrays,),
    config=MethodConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
)
