"""Energy of nodes: measured where a machine does that, else as their profiles have it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from edgefl.devices.energy import Meter
from edgefl.devices.energy.model import modelled_joules as node_joules

__all__ = ["node_joules", "sampled", "total", "word"]
SAMPLE_S = 1.0
"""Seconds between two looks at a meter."""


def total(joules: Iterable[float | None]) -> float | None:
    """The sum over the nodes whose energy is known; None where that is nobody's."""
    known = [j for j in joules if j is not None]
    return sum(known) if known else None


def word(kinds: Iterable[str | None]) -> str | None:
    """What joules of nodes are that were found in these ways, None where not at all.

    >>> word(["measured", None, "modelled"]), word(["modelled"]), word([None])
    ('measured and modelled', 'modelled', None)
    """
    return " and ".join(sorted({kind for kind in kinds if kind is not None})) or None


@contextmanager
def sampled(meter: Meter, every_s: float = SAMPLE_S) -> Iterator[None]:
    """Look at a meter now and then, from a thread of its own, and once more at the end."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(every_s):
            meter.sample(time.monotonic())

    meter.sample(time.monotonic())
    thread = threading.Thread(target=look, name="energy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        meter.sample(time.monotonic())
