"""A queue of messages that leave one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from toy import access, run_toy

from edgefl.nodes import Message
from edgefl.patterns.out_queue import OutQueue


@dataclass(frozen=True)
class Load(Message):
    number: int
    values: torch.Tensor


def load(number):
    return 1, Load(number, torch.zeros(1000))


async def all_that_comes(node):
    got = []
    while (m := await node.receive(Load, timeout_s=5.0)) is not None:
        got.append((m.number, round(node.now(), 1)))
    return got


def received(sender):
    """What node 1 receives, over an uplink that takes about a second for each message."""
    return run_toy([sender, all_that_comes], (Load,), access=access(4100.0, 1e9)).results[1]


def test_messages_leave_one_after_the_other_beside_the_program():
    async def program(node):
        queue = OutQueue(node)
        queue.extend(load(k) for k in range(3))
        await node.sleep(1.5)
        assert node.now() == 1.5 and len(queue) == 1
        await node.sleep(10.0)

    assert [number for number, _ in received(program)] == [0, 1, 2]


def test_replacing_drops_what_has_not_begun_to_leave():
    async def program(node):
        queue = OutQueue(node)
        queue.extend(load(k) for k in range(4))
        await node.sleep(1.5)  # 1 is on the wire
        queue.replace([load(7)])
        assert len(queue) == 1
        await node.sleep(10.0)

    assert [number for number, _ in received(program)] == [0, 1, 7]


def test_an_empty_queue_starts_again():
    async def program(node):
        queue = OutQueue(node)
        queue.extend([load(0)])
        await node.sleep(3.0)
        assert len(queue) == 0
        queue.extend([load(1)])
        queue.replace([])
        queue.extend([load(2)])
        await node.sleep(10.0)

    assert [number for number, _ in received(program)] == [0, 2]
