"""Energy as modelled: a profile's idle and busy power, and joules per byte."""

from __future__ import annotations

from collections.abc import Iterable

from edgefl.devices import DeviceProfile


def node_joules(profile: DeviceProfile, time_s: float, busy_s: float, num_bytes: int) -> float | None:
    """Joules of one node: idle_w time_s + (busy_w - idle_w) busy_s + radio_j_per_byte num_bytes.

    busy_s: over all lanes of the processor. num_bytes: sent and received.
    None where the profile has no power.
    """
    if profile.idle_w is None or profile.busy_w is None:
        return None
    working_s = busy_s / profile.lanes
    radio = (profile.radio_j_per_byte or 0.0) * num_bytes
    return profile.idle_w * time_s + (profile.busy_w - profile.idle_w) * working_s + radio


def total(joules: Iterable[float | None]) -> float | None:
    """The sum over the nodes whose energy is known; None where that is nobody's."""
    known = [j for j in joules if j is not None]
    return sum(known) if known else None
