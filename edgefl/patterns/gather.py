"""Gather: one report from each of a set of nodes, as they come in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import Any, TypeVar

from edgefl.nodes import Gone, Message, Node

M = TypeVar("M", bound=Message)


async def gather(
    node: Node,
    kind: type[M] | tuple[type[M], ...],
    senders: Collection[int],
    *,
    timeout_s: float | None = None,
    **fields: Any,
) -> AsyncIterator[M]:
    """Yield one message of `kind`, or of one of several, from each sender, as they arrive, until all are in.

    A sender that is gone is no longer waited for. After timeout_s seconds (None: never) what has not
    come is given up. fields: as in receive, e.g. round=t.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    waiting = set(senders)
    end_s = None if timeout_s is None else node.now() + timeout_s
    while waiting:
        left_s = None if end_s is None else end_s - node.now()
        message = await node.receive(*kinds, Gone, sender=waiting, timeout_s=left_s, **fields)
        if message is None:
            return
        waiting.discard(message.sender)
        if isinstance(message, kinds):
            yield message
