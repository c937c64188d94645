"""A method that does nothing but talk: what a message costs the testbed."""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.nodes import Message, Method, MethodConfig, Node


@dataclass(frozen=True)
class Word(Message):
    """A few bytes of one round."""

    stale_by = "round"
    round: int


async def peer(node: Node) -> None:
    near = node.fleet.neighbors
    for t in node.rounds():
        node.send(near, Word(t))
        for _ in near:
            await node.receive(Word, round=t)


METHOD = Method(
    name="chatter",
    title="Nodes that talk",
    paper="",
    roles={"peer": peer},
    messages=(Word,),
    config=MethodConfig,
    ends_with=("peer",),
    needs="connected",
    evaluates="each",
)
