"""Where energy is measured, source by source. Each opens on a tree of /sys, so that recorded ones test it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from edgefl.devices.energy.meter import CounterMeter, Meter, NoMeter, PowerMeter, SumMeter, Unavailable
from edgefl.devices.energy.nvml import nvml_meter

Run = Callable[[list[str]], str]
_TOTALS = ("VDD_IN", "POM_5V_IN", "VIN_SYS_5V0", "VDD_MAIN")
"""Names of rails that carry all of a board, by generation of Jetson."""
_PMIC = re.compile(r"^\s*(\S+)_([AV]) (?:current|volt)\(\d+\)=([0-9.]+)[AV]\s*$", re.MULTILINE)


def open_meter(root: Path = Path("/"), run: Run | None = None, *, use_nvml: bool = True) -> Meter:
    """The best meter of this machine: one for the whole board, else for processor and accelerator together.

    root: where /sys lies. run: carries out a command and returns what it says. A source counts when a first
    look at it succeeds. Where none does, a NoMeter that says why, source by source.
    """
    reasons: dict[str, str] = {}

    def tried(source: str, open_source: Callable[[], Meter]) -> Meter | None:
        try:
            return open_source()
        except Unavailable as error:
            reasons[source] = str(error)
            return None

    for source, opened in (
        ("ina3221", lambda: ina3221_meter(root)),
        ("pmic", lambda: pmic_meter(run or _run)),
        ("battery", lambda: battery_meter(root)),
    ):
        meter = tried(source, opened)
        if meter is not None:
            return meter
    parts = [tried("rapl", lambda: rapl_meter(root))]
    parts.append(tried("nvml", nvml_meter) if use_nvml else None)
    found = [part for part in parts if part is not None]
    if not found:
        return NoMeter(reasons)
    return found[0] if len(found) == 1 else SumMeter(found)


def _read(path: Path) -> str:
    """A file's text. Raises Unavailable, with the reason."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except PermissionError as error:
        raise Unavailable(f"{path} may be read by root only (permission denied)") from error
    except OSError as error:
        raise Unavailable(f"{path} cannot be read ({error.strerror})") from error


def _figure(path: Path) -> float:
    found = _read(path)
    try:
        return float(found)
    except ValueError as error:
        raise Unavailable(f"{path} holds {found!r}, not a number") from error


# --- RAPL ------------------------------------------------------------------------------------------------


def rapl_meter(root: Path) -> Meter:
    """The packages of an Intel or AMD processor, and their memory where it is counted.

    A kernel of today lets root alone read the counters.
    """
    folder = root / "sys/class/powercap"
    packages = sorted(p for p in folder.glob("intel-rapl:*") if p.name.count(":") == 1)
    packages = [p for p in packages if _read(p / "name").startswith("package")]
    if not packages:
        raise Unavailable("no /sys/class/powercap/intel-rapl:0: not offered by this processor or kernel")
    memory = [p for package in packages for p in sorted(package.glob("intel-rapl:*:*"))]
    domains = packages + [p for p in memory if _read(p / "name") == "dram"]
    counters: list[Meter] = []
    for domain in domains:
        _figure(domain / "energy_uj")
        full = _figure(domain / "max_energy_range_uj") * 1e-6
        counters.append(
            CounterMeter("rapl", "processor", lambda d=domain: _figure(d / "energy_uj") * 1e-6, full)  # type: ignore[misc]
        )
    if len(counters) == 1:
        return counters[0]
    meter = SumMeter(counters, "processor")
    meter.name = "rapl"
    return meter


# --- Jetson ----------------------------------------------------------------------------------------------


def ina3221_meter(root: Path) -> PowerMeter:
    """The INA3221 chips of a Jetson: the rail that carries the whole board, or the sum of all rails.

    JetPack 5 and later: hwmon, millivolt and milliampere; before: iio, milliwatt.
    """
    drivers = root / "sys/bus/i2c/drivers"
    rails = {**_hwmon_rails(drivers / "ina3221"), **_iio_rails(drivers / "ina3221x")}
    if not rails:
        raise Unavailable("no INA3221 under /sys/bus/i2c/drivers: not a Jetson")
    total = next((name for name in _TOTALS if name in rails), None)
    chosen = list(rails.values()) if total is None else [rails[total]]
    covers = "board" if total in ("VDD_IN", "POM_5V_IN") else "board rails"
    if total == "VIN_SYS_5V0":  # beside it, AGX boards feed GPU and CPU from rails of their own
        chosen = list(rails.values())
    for read in chosen:
        read()
    return PowerMeter("ina3221", covers, lambda: sum(read() for read in chosen))


def _hwmon_rails(driver: Path) -> dict[str, Callable[[], float]]:
    rails: dict[str, Callable[[], float]] = {}
    for label in sorted(driver.glob("*/hwmon/hwmon*/in*_label")):
        number = label.name.removeprefix("in").removesuffix("_label")
        volts, amperes = label.with_name(f"in{number}_input"), label.with_name(f"curr{number}_input")
        name = _read(label)
        if not amperes.exists() or name in ("NC", "sum of shunt voltages"):
            continue

        def watts(volts: Path = volts, amperes: Path = amperes) -> float:
            return _figure(volts) * 1e-3 * _figure(amperes) * 1e-3

        rails[name] = watts
    return rails


def _iio_rails(driver: Path) -> dict[str, Callable[[], float]]:
    rails: dict[str, Callable[[], float]] = {}
    for label in sorted(driver.glob("*/iio:device*/rail_name_*")):
        number = label.name.rpartition("_")[2]
        power = label.with_name(f"in_power{number}_input")

        def watts(power: Path = power) -> float:
            return _figure(power) * 1e-3

        rails[_read(label)] = watts
    return rails


# --- Raspberry Pi 5 --------------------------------------------------------------------------------------


def pmic_meter(run: Run) -> PowerMeter:
    """The power chip of a Raspberry Pi 5: the sum of what its outputs deliver.

    Its own losses, and what hangs on the 5 V pins and USB, are not in it: the board draws some more.
    """
    watts = _pmic_watts(run)
    if watts <= 0:
        raise Unavailable("vcgencmd pmic_read_adc names no current: not a Raspberry Pi 5")
    return PowerMeter("pmic", "board rails", lambda: _pmic_watts(run))


def _pmic_watts(run: Run) -> float:
    said = run(["vcgencmd", "pmic_read_adc"])
    rails: dict[str, dict[str, float]] = {}
    for rail, quantity, figure in _PMIC.findall(said):
        rails.setdefault(rail, {})[quantity] = float(figure)
    return sum(rail["A"] * rail["V"] for rail in rails.values() if len(rail) == 2)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except FileNotFoundError as error:
        raise Unavailable(f"no {command[0]} on this machine") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{' '.join(command)} failed ({error})") from error
    return done.stdout


# --- batteries -------------------------------------------------------------------------------------------


def battery_meter(root: Path) -> PowerMeter:
    """A battery that feeds the machine: its power, or its current times its voltage.

    On mains it says nothing of what the machine draws.
    """
    folder = root / "sys/class/power_supply"
    reason = "no power supply of type Battery"
    for battery in sorted(folder.glob("*")):
        if not (battery / "type").exists() or _read(battery / "type") != "Battery":
            continue
        if (battery / "scope").exists() and _read(battery / "scope") == "Device":
            continue  # a mouse's or a headset's
        try:
            _battery_watts(battery)
        except Unavailable as error:
            reason = str(error)
            continue
        return PowerMeter("battery", "board", lambda b=battery: _battery_watts(b))  # type: ignore[misc]
    raise Unavailable(reason)


def _battery_watts(battery: Path) -> float:
    if (battery / "present").exists() and _figure(battery / "present") == 0:
        raise Unavailable(f"{battery.name} is not plugged in")
    status = _read(battery / "status")
    if status != "Discharging":
        raise Unavailable(f"{battery.name} is {status.lower()}: on mains it does not say what is drawn")
    if (battery / "power_now").exists():
        return abs(_figure(battery / "power_now")) * 1e-6
    return abs(_figure(battery / "current_now")) * 1e-6 * _figure(battery / "voltage_now") * 1e-6
