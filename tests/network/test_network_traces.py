import math

import pytest

from edgefl.errors import ConfigError
from edgefl.network.traces import Trace, drawn_trace, read_trace


def test_steps_hold_until_the_next_one():
    trace = Trace((0.0, 2.0, 5.0), (1.0, 0.5, 2.0))
    assert [trace.value(t) for t in (0, 1.99, 2, 4.9, 5, 100)] == [1.0, 1.0, 0.5, 0.5, 2.0, 2.0]
    assert [trace.next_change_s(t) for t in (0, 2, 4.9, 5)] == [2, 5, 5, math.inf]


def test_a_period_begins_again():
    trace = Trace((0.0, 2.0), (1.0, 0.25), period_s=4.0)
    assert [trace.value(t) for t in (4, 5.5, 6, 4001)] == [1.0, 1.0, 0.25, 1.0]
    assert [trace.next_change_s(t) for t in (1, 2, 3.5, 5)] == [2, 4, 4, 6]
    now, changes = 0.1, []
    for _ in range(1000):
        now = trace.next_change_s(now)
        changes.append(now)
    assert changes[-1] == pytest.approx(2000)


@pytest.mark.parametrize(
    ("begins", "amount", "done"),
    [(0.0, 1.5, 1.5), (0.0, 2.25, 3.0), (3.0, 0.25, 4.0), (3.0, 1.25, 5.0), (0.0, 2.5 * 7, 28.0)],
)
def test_work_on_a_trace_of_speeds_ends_when_its_seconds_are_done(begins, amount, done):
    trace = Trace((0.0, 2.0), (1.0, 0.25), period_s=4.0)
    assert trace.done_s(begins, amount) == pytest.approx(done)


def test_work_at_no_speed_is_never_done():
    assert Trace((0.0, 1.0), (1.0, 0.0)).done_s(0.0, 2.0) == math.inf


def test_drawn_traces_are_keyed_and_keep_their_means():
    draw = {"high": 1.0, "low": 0.2, "mean_high_s": 9.0, "mean_low_s": 3.0, "until_s": 50_000.0}
    trace = drawn_trace(1, "link", 4, **draw)
    assert trace == drawn_trace(1, "link", 4, **draw) != drawn_trace(1, "link", 5, **draw)
    assert set(trace.values) == {1.0, 0.2} and trace.times_s[0] == 0
    assert trace.done_s(0.0, 1.0) > 0
    ends = (*trace.times_s[1:], trace.period_s)
    high = sum(b - a for a, b, v in zip(trace.times_s, ends, trace.values, strict=True) if v == 1.0)
    assert high / trace.period_s == pytest.approx(0.75, abs=0.02)


def test_a_file(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("time_s,value\n0,1\n10,0.5\n12.5,0.75\n")
    assert read_trace(path, "k") == Trace((0.0, 10.0, 12.5), (1.0, 0.5, 0.75))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time_s,value\n0,1\n5,1\n4,1\n", "line 4: times that rise, not 4 after 5"),
        ("time_s,value\n-1,1\n", "line 2: a time from 0 on"),
        ("time_s,value\n0,7\n", "line 2: a value from 0 to 2"),
        ("time_s,value\n0,nan\n", "line 2: 2 numbers"),
        ("time_s,value\n0,1,2\n", "line 2: 2 numbers"),
        ("time,value\n0,1\n", "a first line time_s,value"),
        ("time_s,value\n", "at least one line"),
    ],
)
def test_wrong_files_are_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refusal:
        read_trace(path, "network.traces.default", most=2.0)
    assert str(refusal.value).startswith("network.traces.default = ") and "\n" not in str(refusal.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="a CSV file that can be read"):
        read_trace(tmp_path / "none.csv", "k")
