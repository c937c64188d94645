"""Energy readers on trees of /sys as real machines have them."""

import ctypes
import os

import pytest

from edgefl.devices.energy import CounterMeter, NoMeter, PowerMeter, SumMeter, open_meter
from edgefl.devices.energy.meter import Unavailable
from edgefl.devices.energy.nvml import nvml_meter
from edgefl.devices.energy.sources import battery_meter, ina3221_meter, pmic_meter, rapl_meter

PMIC = """\
   3V7_WL_SW_A current(0)=0.08000000A
   3V3_SYS_A current(1)=0.10000000A
   VDD_CORE_A current(7)=1.50000000A
   3V7_WL_SW_V volt(8)=3.70000000V
   3V3_SYS_V volt(9)=3.30000000V
   VDD_CORE_V volt(15)=0.80000000V
   EXT5V_V volt(24)=5.14000000V
   BATT_V volt(25)=0.00000000V
"""


def tree(root, files):
    """Files under a root, by path; an int is the mode of an empty file that nobody may read."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def rapl_tree(root, uj=1_000_000, dram_uj=None):
    folder = "sys/class/powercap/intel-rapl:0"
    files = {
        f"{folder}/name": "package-0",
        f"{folder}/energy_uj": uj,
        f"{folder}/max_energy_range_uj": 262143328850,
        f"{folder}/intel-rapl:0:0/name": "core",
        f"{folder}/intel-rapl:0:0/energy_uj": 5,
        f"{folder}/intel-rapl:0:0/max_energy_range_uj": 262143328850,
        "sys/class/powercap/intel-rapl:1/name": "psys",
        "sys/class/powercap/intel-rapl:1/energy_uj": 9,
    }
    if dram_uj is not None:
        files |= {
            f"{folder}/intel-rapl:0:1/name": "dram",
            f"{folder}/intel-rapl:0:1/energy_uj": dram_uj,
            f"{folder}/intel-rapl:0:1/max_energy_range_uj": 65712999613,
        }
    return tree(root, files)


def nothing(command):
    raise Unavailable(f"no {command[0]} on this machine")


# --- RAPL ------------------------------------------------------------------------------------------------


def test_rapl_counts_packages_and_memory_but_no_part_twice(tmp_path):
    meter = rapl_meter(rapl_tree(tmp_path, 1_000_000, dram_uj=500_000))
    assert meter.joules is None
    meter.sample(0.0)
    assert meter.joules == 0
    rapl_tree(tmp_path, 4_000_000, dram_uj=750_000)
    meter.sample(1.0)
    assert meter.joules == pytest.approx(3.25) and meter.covers == "processor" and meter.name == "rapl"


def test_a_wrapped_counter_goes_on(tmp_path):
    meter = rapl_meter(rapl_tree(tmp_path, 262143000000))
    meter.sample(0.0)
    rapl_tree(tmp_path, 671150)
    meter.sample(1.0)
    assert meter.joules == pytest.approx(1.0)


def test_a_counter_that_may_not_be_read_says_so(tmp_path):
    rapl_tree(tmp_path)
    file = tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj"
    file.chmod(0)
    if os.geteuid() == 0:  # root may read all: a folder in its place cannot be read by anybody
        file.unlink()
        file.mkdir()
        with pytest.raises(Unavailable, match="cannot be read"):
            rapl_meter(tmp_path)
        return
    with pytest.raises(Unavailable, match="permission denied"):
        rapl_meter(tmp_path)


def test_permission_denied_is_told_as_such(tmp_path, monkeypatch):
    rapl_tree(tmp_path)

    def denied(self, *args, **kwargs):
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return original(self, *args, **kwargs)

    original = type(tmp_path).read_text
    monkeypatch.setattr(type(tmp_path), "read_text", denied)
    meter = open_meter(tmp_path, nothing, use_nvml=False)
    assert isinstance(meter, NoMeter) and meter.joules is None
    assert "permission denied" in meter.reasons["rapl"] and "no vcgencmd" in meter.reasons["pmic"]


def test_a_counter_that_disappears_leaves_no_figure(tmp_path):
    meter = rapl_meter(rapl_tree(tmp_path))
    meter.sample(0.0)
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").unlink()
    meter.sample(1.0)
    assert meter.joules is None and "cannot be read" in meter.reason


def test_a_counter_without_an_end_that_goes_back_is_not_trusted():
    values = iter((5.0, 3.0))
    meter = CounterMeter("x", "board", lambda: next(values))
    meter.sample(0.0)
    meter.sample(1.0)
    assert meter.joules is None and "went back" in meter.reason


# --- Jetson ----------------------------------------------------------------------------------------------


def orin_tree(root, milliamperes):
    folder = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"
    rails = (("VDD_IN", 5000, milliamperes), ("VDD_CPU_GPU_CV", 4900, 300), ("VDD_SOC", 4900, 200))
    files = {}
    for i, (name, millivolts, current) in enumerate(rails, start=1):
        files |= {
            f"{folder}/in{i}_label": name,
            f"{folder}/in{i}_input": millivolts,
            f"{folder}/curr{i}_input": current,
        }
    files |= {f"{folder}/in7_label": "sum of shunt voltages", f"{folder}/in7_input": 3}
    return tree(root, files)


def test_a_jetson_orin_by_its_rail_of_the_whole_board(tmp_path):
    meter = ina3221_meter(orin_tree(tmp_path, 1000))
    meter.sample(0.0)
    orin_tree(tmp_path, 2000)
    meter.sample(2.0)
    assert meter.joules == pytest.approx(2.0 * (5 + 10) / 2) and meter.covers == "board"


def test_an_agx_is_the_sum_of_its_rails(tmp_path):
    folder = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon4"
    files = {}
    for i, (name, current) in enumerate((("VDD_GPU_SOC", 1000), ("VIN_SYS_5V0", 500)), start=1):
        files |= {
            f"{folder}/in{i}_label": name,
            f"{folder}/in{i}_input": 5000,
            f"{folder}/curr{i}_input": current,
        }
    assert ina3221_meter(tree(tmp_path, files)).read() == pytest.approx(7.5)


def test_an_old_jetson_in_milliwatts(tmp_path):
    folder = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    files = {
        f"{folder}/rail_name_0": "POM_5V_IN", f"{folder}/in_power0_input": 3300,
        f"{folder}/rail_name_1": "POM_5V_GPU", f"{folder}/in_power1_input": 100,
    }  # fmt: skip
    assert ina3221_meter(tree(tmp_path, files)).read() == pytest.approx(3.3)


def test_no_jetson(tmp_path):
    with pytest.raises(Unavailable, match="not a Jetson"):
        ina3221_meter(tmp_path)


# --- Raspberry Pi ----------------------------------------------------------------------------------------


def test_a_raspberry_pi_5_sums_what_has_both_current_and_voltage():
    watts = 0.08 * 3.7 + 0.1 * 3.3 + 1.5 * 0.8
    assert pmic_meter(lambda command: PMIC).read() == pytest.approx(watts)


@pytest.mark.parametrize("said", ["", "error=1 error_msg='Command not registered'", "EXT5V_V volt(24)=5.1V"])
def test_an_older_raspberry_pi_says_that_it_is_none(said):
    with pytest.raises(Unavailable, match="not a Raspberry Pi 5"):
        pmic_meter(lambda command: said)


# --- batteries -------------------------------------------------------------------------------------------


def battery_tree(root, **files):
    folder = "sys/class/power_supply/BAT0"
    standard = {"type": "Battery", "present": 1, "status": "Discharging"}
    return tree(root, {f"{folder}/{k}": v for k, v in (standard | files).items()})


def test_a_discharging_battery(tmp_path):
    assert battery_meter(battery_tree(tmp_path, power_now=12_500_000)).read() == 12.5


def test_a_battery_that_gives_current_and_voltage(tmp_path):
    root = battery_tree(tmp_path, current_now=-1_000_000, voltage_now=11_400_000)
    assert battery_meter(root).read() == pytest.approx(11.4)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"present": 0, "power_now": 5}, "BAT0 is not plugged in"),
        ({"status": "Charging", "power_now": 5}, "BAT0 is charging: on mains"),
        ({"status": "Full", "power_now": 5}, "BAT0 is full: on mains"),
        ({}, "current_now cannot be read"),
        ({"power_now": "many"}, "holds 'many', not a number"),
        ({"scope": "Device", "power_now": 5}, "no power supply of type Battery"),
    ],
)
def test_a_battery_that_tells_nothing_says_why(tmp_path, files, reason):
    with pytest.raises(Unavailable, match=reason):
        battery_meter(battery_tree(tmp_path, **files))


def test_a_battery_that_is_plugged_in_on_the_way_leaves_no_figure(tmp_path):
    meter = battery_meter(battery_tree(tmp_path, power_now=10_000_000))
    meter.sample(0.0)
    meter.sample(2.0)
    assert meter.joules == pytest.approx(20)
    battery_tree(tmp_path, power_now=0, status="Charging")
    meter.sample(3.0)
    assert meter.joules is None and "charging" in meter.reason


# --- NVML ------------------------------------------------------------------------------------------------


class Library:
    """libnvidia-ml with devices that have a counter, or power alone."""

    def __init__(self, millijoules=(), milliwatts=()):
        self.millijoules, self.milliwatts = list(millijoules), list(milliwatts)

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 1234
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, out):
        if not self.millijoules:
            return 3  # not supported
        assert isinstance(out._obj, ctypes.c_ulonglong)
        out._obj.value = self.millijoules.pop(0)
        return 0

    def nvmlDeviceGetPowerUsage(self, handle, out):
        out._obj.value = self.milliwatts.pop(0)
        return 0


def test_an_accelerator_with_a_counter():
    meter = nvml_meter(Library(millijoules=[1000, 1000, 3500]))
    meter.sample(0.0)
    meter.sample(1.0)
    assert meter.joules == pytest.approx(2.5) and meter.covers == "accelerator"


def test_an_accelerator_with_power_alone():
    meter = nvml_meter(Library(milliwatts=[100_000] * 3))
    meter.sample(0.0)
    meter.sample(2.0)
    assert meter.joules == pytest.approx(200)


# --- which one -------------------------------------------------------------------------------------------


def test_a_meter_of_the_whole_board_comes_first(tmp_path):
    rapl_tree(tmp_path)
    assert open_meter(tmp_path, nothing, use_nvml=False).name == "rapl"
    battery_tree(tmp_path, power_now=5_000_000)
    assert open_meter(tmp_path, nothing, use_nvml=False).name == "battery"
    orin_tree(tmp_path, 1000)
    assert open_meter(tmp_path, nothing, use_nvml=False).name == "ina3221"


def test_where_nothing_measures_every_source_says_why(tmp_path):
    meter = open_meter(tmp_path, nothing, use_nvml=False)
    meter.sample(0.0)
    assert meter.joules is None
    assert set(meter.reasons) == {"ina3221", "pmic", "battery", "rapl"} and "rapl: no /sys" in meter.reason


def test_parts_that_are_measured_apart_add_up_or_are_not_known():
    good = PowerMeter("a", "processor", lambda: 2.0)
    values = iter((1.0, 1.0))

    def failing():
        try:
            return next(values)
        except StopIteration:
            raise Unavailable("gone") from None

    both = SumMeter([good, PowerMeter("b", "accelerator", failing)])
    both.sample(0.0)
    both.sample(1.0)
    assert both.joules == 3.0 and both.name == "a + b"
    both.sample(2.0)
    assert both.joules is None and both.reason == "gone"
