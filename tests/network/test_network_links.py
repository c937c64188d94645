import math

import pytest

from edgefl.errors import ConfigError
from edgefl.network import Access, NetworkPlan, link, links, make_topology, parse_link, parse_rate, parse_time
from edgefl.network.links import channel_bytes_per_s


def test_the_catalog_has_the_usual_classes_each_with_a_source():
    assert {"ethernet", "fibre", "adsl", "wifi-4", "wifi-5", "lte", "5g", "starlink", "home"} <= set(links())
    assert all(entry.name == name and entry.source for name, entry in links().items())
    assert link("home").up_bytes_per_s * 8 == 2e6


def test_unknown_class_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'starlink'"):
        link("star-link")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("8 bit/s", 1),
        ("2 Mbit/s", 250e3),
        ("1Gbit/s", 125e6),
        ("1.5 MB/s", 1.5e6),
        ("3 kB/s", 3000),
        ("1e3 B/s", 1000),
    ],
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


def test_times():
    assert [parse_time(text) for text in ("250 us", "20 ms", "1 s")] == pytest.approx([250e-6, 0.02, 1.0])


@pytest.mark.parametrize("text", ["2 Mbps", "2", 2, "-1 Mbit/s", "Mbit/s", "2 mbit/s", "nan MB/s"])
def test_other_units_are_refused(text):
    with pytest.raises(ConfigError, match=r"link.up = .*Mbit/s"):
        parse_link({"up": text, "down": "1 MB/s"}, "link")


def test_a_table_becomes_a_link():
    found = parse_link(
        {"up": "2 Mbit/s", "down": "10 Mbit/s", "latency": "20 ms", "loss": 0.01, "segment": "ap"}
    )
    assert found == Access(
        up_bytes_per_s=250e3, down_bytes_per_s=1.25e6, latency_s=0.02, loss=0.01, segment="ap"
    )
    assert parse_link({"up_bytes_per_s": 5, "down_bytes_per_s": 6}).down_bytes_per_s == 6
    assert parse_link("lte") == link("lte")


def test_like_fills_in_what_is_missing():
    found = parse_link({"like": "lte", "up": "1 MB/s"})
    assert found.up_bytes_per_s == 1e6 and found.down_bytes_per_s == link("lte").down_bytes_per_s


def test_a_wireless_link_has_the_rate_of_its_channel():
    """Twice the ratio is one bit more per second and hertz where it is large, half the band half the rate."""
    assert channel_bytes_per_s(8e6, 0.0) == 1e6
    assert channel_bytes_per_s(8e6, 10 * math.log10(3)) == pytest.approx(2e6)
    assert channel_bytes_per_s(8e6, 10 * math.log10(1023)) == pytest.approx(10e6)
    found = parse_link({"bandwidth": "4 MHz", "snr_db": 10 * math.log10(15), "latency": "3 ms"})
    assert found.up_bytes_per_s == found.down_bytes_per_s == pytest.approx(2e6) and found.latency_s == 0.003
    other = parse_link({"like": "lte", "bandwidth": "4 MHz", "snr_db": 0, "up": "1 kB/s"})
    assert (other.up_bytes_per_s, other.down_bytes_per_s) == (1e3, 0.5e6)
    assert other.latency_s == link("lte").latency_s


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"bandwidth": "5 MHz"}, r"link.snr_db = None: a number of decibels"),
        ({"snr_db": 10}, r"link.bandwidth = None: a number and a unit, one of Hz, kHz"),
        ({"bandwidth": "5 MB/s", "snr_db": 10}, r"link.bandwidth = '5 MB/s': a number and a unit"),
        ({"bandwidth": "0 MHz", "snr_db": 10}, r"link.bandwidth = '0 MHz': more than 0 Hz"),
        ({"bandwidth": "5 MHz", "snr_db": "10 dB"}, r"link.snr_db = '10 dB': a number of decibels"),
        ({"bandwidth": "5 MHz", "snr_db": float("nan")}, r"link.snr_db = nan"),
        ({"up": "1 MB/s"}, r"link.down = None"),
        ({"up": "1 MB/s", "down": "0 MB/s"}, r"link.down_bytes_per_s = 0.0: should be greater than 0"),
        ({"up": "1 MB/s", "down": "1 MB/s", "loss": 2}, r"link.loss = 2"),
        ({"up": "1 MB/s", "down": "1 MB/s", "jitter": "big"}, r"link.jitter = 'big'"),
        ({"up": "1 MB/s", "down": "1 MB/s", "latencie": "1 s"}, r"did you mean 'latency'"),
        ({"up": "1 MB/s", "up_bytes_per_s": 3, "down": "1 MB/s"}, r"up says the same"),
        ({"like": "ltee"}, "did you mean 'lte'"),
    ],
)
def test_wrong_tables_are_refused_in_one_line(table, said):
    with pytest.raises(ConfigError, match=said) as caught:
        parse_link(table, "link")
    assert "\n" not in str(caught.value)


def test_plan_takes_the_narrowest_place():
    ends = (link("ethernet"), parse_link({"like": "lte", "segment": "ap"}))
    plan = NetworkPlan(make_topology("ring", 2), ends, segments={"ap": 1e6}, caps={(1, 0): 10.0})
    assert plan.rate_bytes_per_s(0, 1) == 1e6
    assert plan.rate_bytes_per_s(1, 0) == 10.0
    assert plan.latency_s(0, 1) == pytest.approx(0.0252)


def test_a_path_holds_every_pair_but_those_with_a_cap_of_their_own():
    ends = (link("ethernet"), link("ethernet"))
    plan = NetworkPlan(make_topology("ring", 2), ends, path_bytes_per_s=100.0, caps={(1, 0): 1000.0})
    assert (plan.cap(0, 1), plan.cap(1, 0)) == (100.0, 1000.0)
    assert (plan.rate_bytes_per_s(0, 1), plan.rate_bytes_per_s(1, 0)) == (100.0, 1000.0)


def test_each_figure_of_a_class_says_where_it_comes_from():
    figures = {"up_bytes_per_s", "down_bytes_per_s", "latency_s", "jitter", "loss"}
    for name, entry in links().items():
        assert {figure for source in entry.sources for figure in source.figures} == figures, name
        assert all(s.url or s.says.startswith("assumed") for s in entry.sources), name
        assert any(source.url for source in entry.sources), name
    assert parse_link({"like": "lte", "up": "1 MB/s"}).sources == ()
