"""A long vector that moves towards others, one after the other, on several threads where a run lends some.

Each coordinate moves in the order given, so that results are the same, bit for bit, on any threads. One core
reads memory more slowly than two together: a move of 4 MB takes 165 to 175 us on one, 98 to 130 on two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

from torch import Tensor

_LEAST = 1 << 18
"""Values of a piece, at least: less is not worth another thread's while."""
_HELD = 1 << 23
"""Values, 32 MB, that are held until they are moved towards, at most: eight models of a million."""
_LINE = 64
"""Pieces begin at multiples of it: no line of a cache is written by two threads, and only in the last piece
are there values that fill no register, as in the whole."""


class Threads(Protocol):
    """Threads that calls may be handed to. beside: how many there are beside the caller's own."""

    beside: int

    def submit(self, call: Callable[[int], None]) -> Any:
        """Have a call made, with the place of its thread; result() of what is returned waits for it."""
        ...


_lent: ContextVar[Threads | None] = ContextVar("threads lent for long sums", default=None)


@contextmanager
def lent(threads: Threads | None) -> Iterator[None]:
    """Within the block, moves that begin in this thread are made on these threads too."""
    token = _lent.set(threads)
    try:
        yield
    finally:
        _lent.reset(token)


class Moves:
    """Moves of `values` (P,), in place; where threads are lent, made some at a time and piece beside piece.

    What they go towards is held until then, and must not be changed.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._threads = values, _lent.get()
        most = 1 if self._threads is None else self._threads.beside + 1
        pieces = max(1, min(most, len(values) // _LEAST))
        cuts = [len(values) * k // pieces // _LINE * _LINE for k in range(1, pieces)]
        self._pieces = list(itertools.pairwise((0, *cuts, len(values))))
        self._noted: list[tuple[Tensor, float]] = []

    def add(self, target: Tensor, share: float) -> None:
        """values <- lerp(values, target, share), now or later. target: (P,) of the same dtype."""
        if len(self._pieces) == 1:
            self._values.lerp_(target, share)
            return
        self._noted.append((target, share))
        if (len(self._noted) + 1) * len(self._values) > _HELD:
            self.finish()

    def finish(self) -> Tensor:
        """The values, all moves made."""
        if self._noted and self._threads is not None:
            moves, self._noted = self._noted, []
            first, *others = [partial(_move, self._values, a, b, moves) for a, b in self._pieces]
            jobs = [self._threads.submit(call) for call in others]
            first(0)
            for job in jobs:
                job.result()
        return self._values


def _move(values: Tensor, start: int, stop: int, moves: Sequence[tuple[Tensor, float]], _: int) -> None:
    """The moves of one piece."""
    piece = values[start:stop]
    for target, share in moves:
        piece.lerp_(target[start:stop], share)
