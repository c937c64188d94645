"""What trees of /sys and /proc, as real machines have them, say of their machine."""

from pathlib import Path

import pytest

from edgefl.devices.profiler import read_facts

MEMORY = "MemTotal:        8131000 kB\nMemFree:          100000 kB\nMemAvailable:    7000000 kB\n"
CPUS = "".join(f"processor\t: {i}\nmodel name\t: A Processor\n\n" for i in range(4))


def tree(root: Path, files: dict[str, str | int]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_a_raspberry_pi(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0",
            "proc/device-tree/compatible": "raspberrypi,5-model-b\0brcm,bcm2712\0",
            "etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"',
            "proc/cpuinfo": CPUS.replace("model name", "BogoMIPS"),
            "proc/meminfo": MEMORY,
            "proc/loadavg": "0.42 0.2 0.1 1/200 999",
            "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": 2400000,
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": 1500000,
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "ondemand",
            "sys/class/thermal/thermal_zone0/temp": 61450,
            "sys/devices/platform/soc/soc:firmware/get_throttled": "50005",
        },
    )
    facts = read_facts(root)
    assert facts.found["board"] == "Raspberry Pi 5 Model B Rev 1.0"
    assert facts.found["board_kind"] == "raspberry-pi" and facts.found["container"] is False
    assert facts.found["system"] == "Debian GNU/Linux 12 (bookworm)" and facts.found["cores"] == 4
    assert facts.found["frequency_max_hz"] == 2.4e9 and facts.found["frequency_now_hz"] == 1.5e9
    assert facts.found["memory_total_bytes"] == 8131000 * 1024
    assert facts.found["memory_free_bytes"] == 7000000 * 1024
    assert facts.found["temperature_c"] == 61.45 and facts.found["throttled"] is True
    assert facts.found["load"] == 0.42
    assert facts.found["battery"] is None and "battery" in facts.why
    assert "board" not in facts.why


@pytest.mark.parametrize(("said", "throttled"), [("0", False), ("0x50000", False), ("0x4", True)])
def test_what_was_throttled_once_is_not_throttled_now(tmp_path, said, throttled):
    file = "sys/devices/platform/soc/soc:firmware/get_throttled"
    assert read_facts(tree(tmp_path, {file: said})).found["throttled"] is throttled


def test_a_jetson(tmp_path):
    facts = read_facts(
        tree(
            tmp_path,
            {
                "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
                "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005\0nvidia,tegra234\0",
            },
        )
    )
    assert facts.found["board_kind"] == "jetson"


def test_a_laptop_in_a_container_with_a_limit(tmp_path):
    supply = "sys/class/power_supply"
    facts = read_facts(
        tree(
            tmp_path,
            {
                "sys/devices/virtual/dmi/id/sys_vendor": "LENOVO",
                "sys/devices/virtual/dmi/id/product_name": "20XW0026GE",
                "proc/cpuinfo": CPUS,
                "proc/meminfo": MEMORY,
                ".dockerenv": "",
                "sys/fs/cgroup/memory.max": 2_000_000_000,
                "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": 0,
                f"{supply}/AC/type": "Mains",
                f"{supply}/BAT0/type": "Battery",
                f"{supply}/BAT0/present": 1,
                f"{supply}/BAT0/status": "Charging",
                f"{supply}/BAT0/capacity": 83,
                f"{supply}/BAT0/energy_full": 50_000_000,
            },
        )
    )
    assert facts.found["board"] == "LENOVO 20XW0026GE" and facts.found["board_kind"] == "other"
    assert facts.found["processor"] == "A Processor" and facts.found["container"] is True
    assert facts.found["memory_limit_bytes"] == 2_000_000_000 and facts.found["throttled"] is False
    assert facts.found["battery"] == {
        "name": "BAT0", "status": "Charging", "level": 0.83, "capacity_j": pytest.approx(180_000),
    }  # fmt: skip


def test_a_battery_that_is_not_there(tmp_path):
    files = {"sys/class/power_supply/BAT0/type": "Battery", "sys/class/power_supply/BAT0/present": 0}
    facts = read_facts(tree(tmp_path, files))
    assert facts.found["battery"] is None and facts.why["battery"] == "BAT0 is not plugged in"


def test_no_limit_is_written_as_a_word_or_a_huge_number(tmp_path):
    files = {"proc/meminfo": MEMORY, "sys/fs/cgroup/memory.max": "max"}
    assert read_facts(tree(tmp_path, files)).found["memory_limit_bytes"] is None
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712}
    assert read_facts(tree(tmp_path, files)).found["memory_limit_bytes"] is None


def test_an_empty_tree_has_a_reason_for_everything_that_is_missing(tmp_path):
    facts = read_facts(tmp_path)
    missing = {key for key, value in facts.found.items() if value is None}
    assert missing == set(facts.why) and all(facts.why.values())
    assert {"board", "cores", "memory_total_bytes", "battery", "throttled", "load"} <= missing
