"""Messages and work for programs on the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgefl.learning.cost import Cost
from edgefl.learning.work import Call
from edgefl.nodes import Message


@dataclass(frozen=True)
class Note(Message):
    text: str = ""
    number: int = 0


@dataclass(frozen=True)
class Load(Message):
    max_size = {"values": 1_000_000}
    values: torch.Tensor


@dataclass(frozen=True)
class Latest(Message):
    newest_by = ("sender",)
    number: int = 0


@dataclass(frozen=True)
class Round(Message):
    stale_by = "round"
    round: int = 0


KINDS = (Note, Load, Latest, Round)


def work(seconds: float, value: object = None) -> Call:
    return Call(_same, (value,), Cost(seconds=seconds))


def _same(value: object) -> object:
    return value


async def nothing(node):
    return None
