"""What the devices of a pipeline tell each other, and what holds of every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edgefl.nodes import Check, Message
from edgefl.parameters import Vector
from edgefl.patterns.all_reduce import Chunk
from edgefl.patterns.cuts import Across
from edgefl.patterns.farewell import Leaving
from edgefl.patterns.reports import ALL_FINITE, answers

Attempt = tuple[int, int]
Place = tuple[int, int, int]
"""(first block, last block, steps made): a part of the model at one time. Blocks first .. last - 1."""


@dataclass(frozen=True)
class Activations(Across):
    """Rows of a micro-batch on their way down; step: number of the micro-batch in the run."""


@dataclass(frozen=True)
class ActivationGradients(Across):
    """Rows of the gradient on their way up."""


@dataclass(frozen=True)
class Called(Message):
    """The leader asks where everybody is; what is under way is void."""

    attempt: tuple[int, int]


@dataclass(frozen=True)
class Position(Message):
    """Where a device is: steps made, the attempt that it took part in last, and what it holds."""

    attempt: tuple[int, int]
    step: int
    known: tuple[int, int]
    held: tuple[Place, ...]


@dataclass(frozen=True)
class Resume(Message):
    """Go on after so many steps. stages: (first block, last block, devices, shares of the rows) of each.

    moves: (from, to, first block, last block) of what is to be handed on before. line: the devices that took
    part in the last attempt; what others hold counts only where it is handed on, or used by themselves.
    """

    attempt: tuple[int, int]
    step: int
    stages: tuple[tuple[int, int, tuple[int, ...], tuple[float, ...]], ...]
    batch: int
    num_micro: int
    policy: str
    warmup: tuple[int, ...]
    chunk: int | None
    moves: tuple[tuple[int, int, int, int], ...] = ()
    line: tuple[int, ...] = ()


@dataclass(frozen=True)
class Portion(Message):
    """Blocks first .. last - 1 after so many steps, with their optimiser's state."""

    stale_by = "turn"
    once_by = ("sender", "turn", "step", "first")
    turn: tuple[int, int]
    step: int
    first: int
    last: int
    parameters: Vector
    state: tuple[Tensor, ...] | None


@dataclass(frozen=True)
class Handed(Portion):
    """To the device that has these blocks from now on."""


@dataclass(frozen=True)
class Copied(Portion):
    """To a neighbour, which keeps them for the case that their only device is lost."""


@dataclass(frozen=True)
class Here(Message):
    """Its sender has returned and has heard nothing: is the run still on?"""


@dataclass(frozen=True)
class Done(Message):
    """This member has made all steps, so many."""

    attempt: tuple[int, int]
    step: int


@dataclass(frozen=True)
class Over(Message):
    """All members have made all steps."""


MESSAGES = (
    Activations, ActivationGradients, Chunk,
    Called, Position, Resume, Handed, Copied, Here, Leaving, Done, Over,
)  # fmt: skip


def _replicas_are_equal(outcome: Any) -> bool | str:
    """Bit for bit: two devices with the same blocks."""
    first: dict[int, tuple[int, Vector]] = {}
    for device, part in outcome.results.items():
        if isinstance(part, Vector):
            other, same = first.setdefault(part.layout.digest, (device, part))
            if not same.equal(part):
                return f"devices {other} and {device} end with unequal parameters of one stage"
    return True


INVARIANTS = (
    ALL_FINITE,
    answers(Activations, ActivationGradients),
    Check("replicas of a stage are equal", _replicas_are_equal),
)
"""Besides what the programs assert: all stages end at one step, and no stage has more micro-batches between
their two passes than the schedule says."""
