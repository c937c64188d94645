"""Gather: one report from each of a set of nodes, as they come in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import Any, TypeVar

from edgefl.nodes import Gone, Message, Node

M = TypeVar("M", bound=Message)


async def gather(
    node: Node, kind: type[M], senders: Collection[int], *, timeout_s: float | None = None, **fields: Any
) -> AsyncIterator[M]:
    """Yield one message of `kind` from each sender, in order of arrival, until all are in.

    A sender that is gone is no longer waited for. After timeout_s seconds (None: never) what has not
    come is given up. fields: as in receive, e.g. round=t.
    """
    waiting = set(senders)
    end_s = None if timeout_s is None else node.now() + timeout_s
    while waiting:
        left_s = None if end_s is None else end_s - node.now()
        message = await node.receive(kind, Gone, sender=waiting, timeout_s=left_s, **fields)
        if message is None:
            return
        waiting.discard(message.sender)
        if isinstance(message, kind):
            yield message
