"""Energy as a profile has it: power at rest and at work, and joules per byte."""

from __future__ import annotations

from edgefl.devices.profile import DeviceProfile


def modelled_joules(profile: DeviceProfile, time_s: float, busy_s: float, num_bytes: float) -> float | None:
    """Joules of one node: idle_w time_s + (busy_w - idle_w) busy_s + radio_j_per_byte num_bytes.

    busy_s: over all lanes of the processor. num_bytes: sent and received.
    None where the profile has no power.
    """
    if profile.idle_w is None or profile.busy_w is None:
        return None
    working_s = busy_s / profile.lanes
    radio = (profile.radio_j_per_byte or 0.0) * num_bytes
    return profile.idle_w * time_s + (profile.busy_w - profile.idle_w) * working_s + radio
