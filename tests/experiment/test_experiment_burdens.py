"""What makes devices slower, thinner or gone over time: traces, background load, heat, batteries, days."""

import pytest
from experiment_files import SMALL

from edgefl.errors import ConfigError, Stuck
from edgefl.experiment.build import build
from edgefl.experiment.config import load_experiment
from edgefl.experiment.preview import preview
from edgefl.experiment.runner import run_experiment

DAY = "faults.availability={period_s=10, up_share=0.6}"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def load(file, *sets, **more):
    return load_experiment(file, list(sets), **more)


def run(file, tmp_path, *sets, name="run"):
    return run_experiment(load(file, *sets), out=tmp_path / name).summary


def test_thin_times_of_a_link_make_rounds_longer(file, tmp_path):
    (tmp_path / "thin.csv").write_text("time_s,value\n0,1\n0.2,0.1\n")
    plain, thin = preview(load(file)), preview(load(file, "network.traces={default='thin.csv'}"))
    assert thin.time_s > 2 * plain.time_s
    for model in ("fair", "local-fair", "fifo"):
        sets = ("network.traces={default='thin.csv'}", f"network.link_model={model}")
        assert preview(load(file, *sets)).time_s > 1.5 * plain.time_s


def test_a_transfer_goes_on_at_the_new_rate_from_the_step_on(file, tmp_path):
    """Half of the model up at the full rate, half at a tenth: 5.5 times as long as alone."""
    sets = ("fleet.devices={laptop=1}", "stop.rounds=1", "network.link={up='1 kB/s', down='1 GB/s'}")
    plain = preview(load(file, *sets))
    (up,) = [s for s in plain.spans if s[0] == 1 and s[1] == "send"][:1]
    middle = (up[2] + up[3]) / 2
    (tmp_path / "half.csv").write_text(f"time_s,value\n0,1\n{middle},0.1\n")
    found = preview(load(file, *sets, "network.traces={laptop='half.csv'}"))
    (slow,) = [s for s in found.spans if s[0] == 1 and s[1] == "send"][:1]
    assert slow[3] - slow[2] == pytest.approx(5.5 * (up[3] - up[2]), rel=1e-3)


def test_drawn_links_are_the_same_for_all_methods(file):
    drawn = "network.traces={default={low=0.1, mean_high_s=5, mean_low_s=5}}"
    traces = [build(load(file, drawn, method=m)).plan.network.traces for m in ("fedavg", "d-psgd")]
    assert list(traces[0].values()) == list(traces[1].values()) and set(traces[0]) == {1, 2, 3, 4}


def test_background_load_takes_its_share_of_the_time(file):
    plain = preview(load(file))
    always = preview(load(file, "fleet.background={load=0.5, mean_on_s=1e9, mean_off_s=1e-9}"))
    for before, after in zip(plain.nodes[1:], always.nodes[1:], strict=True):
        assert after.busy_s == pytest.approx(2 * before.busy_s)
    assert always.nodes[0].busy_s == plain.nodes[0].busy_s


def test_sustained_work_throttles_and_rest_cools(file):
    sets = ("stop.rounds=40", "fleet.devices={raspberry-pi-4b=1}", "network.link=ethernet")
    plain = preview(load(file, *sets), 40)
    hot = preview(load(file, *sets, "fleet.thermal={after_s=0.2, recover_s=1e6, slowdown=3}"), 40)
    busy_s = plain.nodes[1].busy_s
    assert hot.nodes[1].busy_s == pytest.approx(0.2 + 3 * (busy_s - 0.2), rel=0.1)
    cooled = preview(load(file, *sets, "fleet.thermal={after_s=0.2, recover_s=1e-3, slowdown=3}"), 40)
    assert cooled.nodes[1].busy_s == pytest.approx(busy_s)


def test_a_battery_that_runs_flat_ends_a_nodes_life(file, tmp_path):
    sets = ("stop.rounds=200", "stop.time_s=60", "faults.detect_s=0.1", "fleet.battery={capacity_wh=0.002}")
    with pytest.raises(Stuck, match="waits for Back from 1, 2, 3, 4"):
        run(file, tmp_path, *sets)
    events = (tmp_path / "run/events.csv").read_text().splitlines()
    flat = [line.split(",") for line in events if ",battery flat," in line]
    assert len(flat) == 4  # every device, the server on mains
    for time_s, _, node, _ in flat:
        profile = build(load(file)).plan.nodes[int(node)].profile
        # 7.2 J last at most as long as rest takes them, and at least as long as work and radio do.
        assert 7.2 / (profile.busy_w * 2) < float(time_s) <= 7.2 / profile.idle_w * 1.001


def test_a_device_on_a_flat_battery_does_not_return(file, tmp_path):
    """Node 1 goes before its battery would be flat, and would come back after it is."""
    sets = ("stop.time_s=8", "stop.rounds=10000", "fleet.battery={capacity_wh=0.003}")
    crash = "faults.crashes=[{node=1, at_s=0.5, down_s=6}]"
    with pytest.raises(Stuck):
        run(file, tmp_path, *sets, crash)
    events = [line.split(",") for line in (tmp_path / "run/events.csv").read_text().splitlines()]
    assert [e[1] for e in events if e[2] == "1"][:2] == ["crash", "gone"]
    assert not [e for e in events if e[1] == "back"]


def test_days_take_devices_away_for_their_share(file):
    plan = build(load(file, DAY.replace("}", ", until_s=100}"))).plan
    gone = {}
    for crash in plan.faults.crashes:
        gone.setdefault(crash.node, []).append((crash.at_s, crash.at_s + crash.down_s))
    assert set(gone) == {1, 2, 3, 4}
    begins = set()
    for times in gone.values():
        assert all(b > a for a, b in times) and times == sorted(times)
        inside = sum(min(b, 100) - a for a, b in times if a < 100)
        assert inside == pytest.approx(40, abs=0.01) or inside == pytest.approx(40, abs=4)
        begins.add(times[0][0])
    assert len(begins) > 1


def test_a_file_says_who_is_there(file, tmp_path):
    (tmp_path / "there.csv").write_text("time_s,node,up\n1,2,0\n1.5,3,0\n4,2,1\n")
    crashes = build(load(file, "faults.availability={file='there.csv'}")).plan.faults.crashes
    assert [(c.node, c.at_s, c.down_s) for c in crashes] == [(2, 1.0, 3.0), (3, 1.5, None)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time_s,node,up\n2,1,0\n1,1,1\n", "line 3: times that do not fall, not 1 after 2"),
        ("time_s,node,up\n2,9,0\n", "line 2: a node 0 to 4"),
        ("time_s,node,up\n2,1,2\n", "line 2: a node 0 to 4, and 1 or 0"),
    ],
)
def test_wrong_files_are_refused(file, tmp_path, text, message):
    (tmp_path / "there.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        build(load(file, "faults.availability={file='there.csv'}"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("faults.availability={period_s=5}", "either period_s and up_share, or file"),
        ("faults.availability={period_s=5, up_share=0.5, file='x'}", "either period_s and up_share, or file"),
        (DAY, r"faults\.availability\.until_s"),
        ("network.traces={pi-9={low=0.5, mean_high_s=1, mean_low_s=1}}", "no such device here"),
        ("network.traces={default={low=1.5, mean_high_s=1, mean_low_s=1}}", r"network\.traces\.default"),
        ("fleet.background={load=1.0, mean_on_s=1, mean_off_s=1}", r"fleet\.background\.load"),
        ("fleet.thermal={slowdown=0.5}", r"fleet\.thermal\.slowdown"),
        ("fleet.battery={capacity_wh=-1}", r"fleet\.battery\.capacity_wh"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(file, setting, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        build(load(file, setting))
    assert "\n" not in str(refusal.value)


def test_a_battery_needs_power_figures(file, tmp_path):
    (tmp_path / "bare.toml").write_text(
        "compute_flops=1e9\nmemory_bytes_per_s=1e9\nmemory_bytes=1000000000\n"
    )
    sets = ("fleet.devices={'bare.toml'=2}", "fleet.battery={capacity_wh=5}")
    with pytest.raises(ConfigError, match="bare has no power figures"):
        build(load(file, *sets))
