"""What the files of /sys and /proc say of a machine, under any root: recorded trees too.

What is not offered is None, with a reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Facts:
    """found: figures and names by key, None where there is none. why: the reason, by key."""

    found: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any, why: str) -> None:
        """Keep a value, or the reason why there is none."""
        self.found[key] = value
        if value is None:
            self.why[key] = why


def read_facts(root: Path = Path("/")) -> Facts:
    """All that the tree under `root` says: board, system, processor, memory, heat, battery, load."""
    facts = Facts()
    for part in (_board, _system, _processor, _memory, _heat, _battery, _load):
        part(root, facts)
    return facts


def text(path: Path) -> str | None:
    """A file's text without NULs and blanks at its ends; None where it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip("\0 \n\t") or None
    except OSError:
        return None


def number(path: Path) -> float | None:
    """A file that holds one number."""
    found = text(path)
    try:
        return None if found is None else float(found)
    except ValueError:
        return None


def _board(root: Path, facts: Facts) -> None:
    tree = root / "proc/device-tree"
    model = text(tree / "model")
    compatible = text(tree / "compatible") or ""
    dmi = root / "sys/devices/virtual/dmi/id"
    if model is None:
        names = [text(dmi / name) for name in ("sys_vendor", "product_name")]
        model = " ".join(name for name in names if name) or None
    facts.put("board", model, "neither a device tree nor DMI names it")
    kind = "other"
    if model is not None and "Raspberry Pi" in model:
        kind = "raspberry-pi"
    elif "nvidia,tegra" in compatible or "nvidia,p" in compatible:
        kind = "jetson"
    facts.put("board_kind", kind, "")


def _system(root: Path, facts: Facts) -> None:
    release = text(root / "etc/os-release") or ""
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
    facts.put("system", name[1] if name else None, "no /etc/os-release")
    kernel = text(root / "proc/sys/kernel/osrelease")
    facts.put("kernel", kernel, "no /proc/sys/kernel/osrelease")
    marked = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
    groups = text(root / "proc/1/cgroup") or ""
    named = re.search(r"docker|kubepods|containerd|libpod|lxc", groups) is not None
    facts.put("container", marked or named, "")


def _processor(root: Path, facts: Facts) -> None:
    info = text(root / "proc/cpuinfo") or ""
    cores = len(re.findall(r"^processor\s*:", info, re.MULTILINE)) or None
    facts.put("cores", cores, "no /proc/cpuinfo")
    name = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", info, re.MULTILINE)
    facts.put("processor", name[1].strip() if name else None, "/proc/cpuinfo does not name it")
    folder = root / "sys/devices/system/cpu/cpu0/cpufreq"
    reason = "no cpufreq: a virtual machine, or the kernel does not offer it"
    for key, file in (("frequency_max_hz", "cpuinfo_max_freq"), ("frequency_now_hz", "scaling_cur_freq")):
        kilohertz = number(folder / file)
        facts.put(key, None if kilohertz is None else kilohertz * 1e3, reason)
    facts.put("governor", text(folder / "scaling_governor"), reason)


def _memory(root: Path, facts: Facts) -> None:
    info = text(root / "proc/meminfo") or ""
    for key, word in (("memory_total_bytes", "MemTotal"), ("memory_free_bytes", "MemAvailable")):
        found = re.search(rf"^{word}:\s*(\d+) kB", info, re.MULTILINE)
        facts.put(key, int(found[1]) * 1024 if found else None, "no /proc/meminfo")
    places = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
    limits = [limit for place in places if (limit := number(root / place)) is not None]
    total = facts.found["memory_total_bytes"]
    limit = min(limits, default=None)
    if limit is not None and total is not None and limit >= total:
        limit = None  # "no limit" is written as a huge number
    facts.put("memory_limit_bytes", None if limit is None else int(limit), "no control group limits it")


def _heat(root: Path, facts: Facts) -> None:
    zones = sorted((root / "sys/class/thermal").glob("thermal_zone*"))
    degrees = [t / 1000 for zone in zones if (t := number(zone / "temp")) is not None]
    facts.put("temperature_c", max(degrees, default=None), "no thermal zone")
    firmware = text(root / "sys/devices/platform/soc/soc:firmware/get_throttled")
    counted = number(root / "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count")
    throttled: bool | None = None
    if firmware is not None:
        # Bits 0 to 3 say what is so now: under-voltage, capped, throttled, soft limit; 16 to 19, what was.
        throttled = bool(int(firmware, 16) & 0xF)
    elif counted is not None:
        throttled = counted > 0
    facts.put("throttled", throttled, "neither the firmware nor the processor tells of throttling")


def _battery(root: Path, facts: Facts) -> None:
    reason = "no power supply of type Battery"
    for folder in sorted((root / "sys/class/power_supply").glob("*")):
        if text(folder / "type") != "Battery" or text(folder / "scope") == "Device":
            continue
        if number(folder / "present") == 0:
            reason = f"{folder.name} is not plugged in"
            continue
        facts.put("battery", _one_battery(folder), "")
        return
    facts.put("battery", None, reason)


def _one_battery(folder: Path) -> dict[str, Any]:
    """name, status, level (a share) and capacity_j of a battery."""
    level, energy = number(folder / "capacity"), number(folder / "energy_full")
    charge, volts = number(folder / "charge_full"), number(folder / "voltage_min_design")
    joules = None
    if energy is not None:
        joules = energy * 1e-6 * 3600
    elif charge is not None and volts is not None:
        joules = charge * 1e-6 * 3600 * volts * 1e-6
    return {
        "name": folder.name,
        "status": text(folder / "status"),
        "level": None if level is None else level / 100,
        "capacity_j": joules,
    }


def load_average(root: Path = Path("/")) -> float | None:
    """Runnable tasks over the last minute, on average."""
    found = text(root / "proc/loadavg")
    try:
        return None if found is None else float(found.split()[0])
    except (ValueError, IndexError):
        return None


def _load(root: Path, facts: Facts) -> None:
    facts.put("load", load_average(root), "no /proc/loadavg")
