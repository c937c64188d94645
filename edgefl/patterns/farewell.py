"""Ending together: who has made its rounds goes on serving those who have not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from edgefl.nodes import Gone, Message, Node


@dataclass(frozen=True)
class Finished(Message):
    """Its sender has made its rounds and asks nobody for anything any more; it still answers."""


@dataclass(frozen=True)
class Leaving(Message):
    """Its sender answers no more, although others may not have finished: to them it is as good as gone."""


async def until_all_finish(node: Node, others: Collection[int], *, timeout_s: float | None = None) -> None:
    """Say that this node has finished, and wait until all others have, or are gone.

    Meanwhile the node's child tasks go on. A node that has been gone is not waited for when it returns: it
    may find that the others have ended. So it gives timeout_s, seconds without news after which it leaves
    and says so; whoever asks others for something heeds Leaving as it heeds Gone.
    """
    node.send(others, Finished())
    waiting = set(others)
    while waiting:
        m = await node.receive(Finished, Gone, sender=waiting, timeout_s=timeout_s)
        if m is None:
            node.send(others, Leaving())
            return
        waiting.discard(m.sender)


def patience_s(node: Node, num_models: int) -> float:
    """Seconds after which others that say nothing are given up.

    Ten times the longest planned local phase of another node and transfer of num_models models from it.
    """
    fleet, size = node.fleet, node.model.init().nbytes
    others = [j for j in fleet.ids() if j != node.id]
    if not others:
        return 0.0
    train_s = max(fleet.step_s(j) * fleet.workload(j).num_steps(fleet.num_examples(j)) for j in others)
    send_s = max(size / fleet.rate_bytes_per_s(j, node.id) + 2 * fleet.latency_s(j, node.id) for j in others)
    return 10 * (train_s + num_models * send_s)
