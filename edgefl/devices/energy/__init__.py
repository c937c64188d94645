"""Energy as this machine measures it; where it does not, the power model of its profile stands in.

RAPL (Intel, AMD), INA3221 (Jetson), the power chip of a Raspberry Pi 5, batteries, NVML.
"""

from edgefl.devices.energy.meter import CounterMeter, Meter, NoMeter, PowerMeter, SumMeter
from edgefl.devices.energy.sources import open_meter

__all__ = ["CounterMeter", "Meter", "NoMeter", "PowerMeter", "SumMeter", "open_meter"]
