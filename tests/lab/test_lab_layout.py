"""What a lab would be, and what the switch does with a frame: nothing is made here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edgefl.errors import ConfigError
from edgefl.keyed import generator
from edgefl.lab.layout import Layout, build_commands, layout
from edgefl.lab.switch import Delays, Port
from edgefl.network import Access, NetworkPlan, make_topology

THIN = Access(up_bytes_per_s=250_000, down_bytes_per_s=1_250_000, latency_s=0.02, jitter=0.1, loss=0.01)
PLAIN = Access(up_bytes_per_s=1_448_000, down_bytes_per_s=2_896_000)


def plan(*access: Access) -> NetworkPlan:
    return NetworkPlan(make_topology("complete", len(access), 0), access)


def said(lab: Layout) -> list[str]:
    return [" ".join(command) for command in build_commands(lab)]


def test_rates_are_shaped_both_ways_and_count_what_a_stream_carries() -> None:
    lab = layout(plan(PLAIN, PLAIN), "x", has_netem=False)
    assert lab.delays == "none"
    lines = said(lab)
    # 1,448 of a frame's 1,514 bytes are the stream's: 1,448,000 B/s of it are 1,514,000 B/s of frames.
    up, down = "tc -n edgefl-x-1 qdisc add dev eth0", "tc -n edgefl-x-switch qdisc add dev p1"
    assert f"{up} root handle 1: tbf rate 12112000bit burst 7240b latency 200ms" in lines
    assert f"{down} root handle 1: tbf rate 24224000bit burst 14480b latency 200ms" in lines
    assert "ip -n edgefl-x-switch link set p1 master br0" in lines


def test_links_with_latency_go_through_the_program_of_the_switch_where_there_is_no_netem() -> None:
    lab = layout(plan(THIN, PLAIN), "x", has_netem=False)
    assert lab.delays == "switch"
    lines = said(lab)
    assert not any("netem" in line for line in lines)
    assert "ip -n edgefl-x-switch link set p0 master b0" in lines
    assert "ip -n edgefl-x-switch link set p1 master b1" in lines


def test_netem_delays_before_the_rate_and_loses() -> None:
    lab = layout(plan(THIN, PLAIN), "x", has_netem=True)
    lines = [line for line in said(lab) if "-n edgefl-x-0 qdisc" in line]
    place = "tc -n edgefl-x-0 qdisc add dev eth0"
    assert lines[0] == f"{place} root handle 1: netem limit 141 delay 20000us 2000us loss 1%"
    assert lines[1].startswith(f"{place} parent 1:1 handle 10: tbf rate ")


def test_every_command_stays_within_the_labs_own_namespaces() -> None:
    for has_netem in (False, True):
        lab = layout(plan(THIN, PLAIN, THIN), "x", has_netem=has_netem)
        made = set()
        for command in build_commands(lab):
            if command[:3] == ("ip", "netns", "add"):
                made.add(command[3])
            else:
                assert command[1] == "-n" and command[2] in made
        assert made == set(lab.namespaces)


def test_nodes_have_addresses_of_their_own() -> None:
    lab = layout(plan(*[PLAIN] * 300), "x", has_netem=False)
    assert len({seat.ip for seat in lab.seats}) == len({seat.mac for seat in lab.seats}) == 300
    assert (lab.seats[0].ip, lab.seats[255].ip) == ("10.77.0.1", "10.77.1.0")
    assert lab.seats[299].mac == "02:ef:1a:00:01:2b"


def test_a_layout_comes_back_from_its_file() -> None:
    lab = layout(plan(THIN, PLAIN), "x", has_netem=False)
    assert Layout.from_dict(lab.as_dict()) == lab


def test_what_a_lab_does_not_do_is_refused_by_its_key() -> None:
    whole = plan(THIN, PLAIN)
    for key, wrong in (
        ("network.path", replace(whole, path_bytes_per_s=1e6)),
        ("network.caps", replace(whole, caps={(0, 1): 1e6})),
        ("network.segments", plan(PLAIN.model_copy(update={"segment": "attic"}), THIN)),
    ):
        with pytest.raises(ConfigError) as found:
            layout(wrong, "x", has_netem=False)
        assert found.value.key == key


def test_frames_wait_both_latencies_and_never_overtake() -> None:
    ports = {0: Port(0.02, 0.5, 0.0), 1: Port(0.01, 0.0, 0.0)}
    delays = Delays(ports, generator(0, "test"))
    due = [delays.due((0, 1), 0.03 * i) for i in range(200)]
    late = [when - 0.03 * i for i, when in enumerate(due) if when is not None]
    assert len(late) == 200
    assert due == sorted(due, key=lambda when: when or 0.0)
    # 20 ms give or take half of it, and 10 ms; one that would overtake waits for the one before.
    assert min(late) >= 0.02 and max(late) <= 0.04
    assert 0.028 < sum(late) / len(late) < 0.034


def test_frames_are_lost_with_the_losses_of_both_ends() -> None:
    delays = Delays({0: Port(0.0, 0.0, 0.1), 1: Port(0.0, 0.0, 0.2)}, generator(0, "test"))
    lost = sum(delays.due((0, 1), float(i)) is None for i in range(20_000)) / 20_000
    assert math.isclose(lost, 1 - 0.9 * 0.8, abs_tol=4 * math.sqrt(0.28 * 0.72 / 20_000))
