"""NVIDIA's management library, for the energy of an accelerator."""

from __future__ import annotations

import ctypes
from typing import Any

from edgefl.devices.energy.meter import CounterMeter, Meter, PowerMeter, SumMeter, Unavailable

_LIBRARY = "libnvidia-ml.so.1"


def nvml_meter(library: Any = None) -> Meter:
    """All NVIDIA devices of this machine: their counters, or their power where they have none.

    library: stands in for the library. Raises Unavailable where it is not there or finds no device.
    """
    nvml = library if library is not None else _loaded()
    _asked(nvml.nvmlInit_v2(), "nvmlInit")
    count = ctypes.c_uint()
    _asked(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), "nvmlDeviceGetCount")
    if not count.value:
        raise Unavailable("NVML finds no device")
    meters = [_device(nvml, i) for i in range(count.value)]
    return meters[0] if len(meters) == 1 else SumMeter(meters, "accelerator")


def _loaded() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise Unavailable(f"no {_LIBRARY}: no NVIDIA driver here") from error


def _device(nvml: Any, index: int) -> Meter:
    handle = ctypes.c_void_p()
    _asked(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)), "nvmlDeviceGetHandleByIndex")

    def counted_j() -> float:
        millijoules = ctypes.c_ulonglong()
        _asked(nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)), "its energy")
        return millijoules.value * 1e-3

    def watts() -> float:
        milliwatts = ctypes.c_uint()
        _asked(nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts)), "its power")
        return milliwatts.value * 1e-3

    try:
        counted_j()
    except Unavailable:
        watts()
        return PowerMeter(f"nvml {index}", "accelerator", watts)
    return CounterMeter(f"nvml {index}", "accelerator", counted_j)


def _asked(code: int, what: str) -> None:
    if code != 0:
        raise Unavailable(f"NVML does not tell {what} (code {code})")
