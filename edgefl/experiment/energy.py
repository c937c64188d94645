"""Energy of nodes: measured where a machine does that, else as their profiles have it."""

from __future__ import annotations

from collections.abc import Iterable

from edgefl.devices.energy.model import modelled_joules as node_joules

__all__ = ["node_joules", "total"]


def total(joules: Iterable[float | None]) -> float | None:
    """The sum over the nodes whose energy is known; None where that is nobody's."""
    known = [j for j in joules if j is not None]
    return sum(known) if known else None
