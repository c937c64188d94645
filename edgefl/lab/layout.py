"""What a lab consists of, and the commands that make it. Nothing is run here.

Each node has a network namespace with one interface, eth0, whose other end, pN, lies in the namespace of the
switch. The uplink's rate is a tbf on eth0, the downlink's one on pN, and a bridge joins the ports. Where
links have a latency or a loss, netem adds it on both ends. In a kernel without netem a program in the
switch's namespace does (edgefl.lab.switch): there, each port is bridged with a TAP of its own, and the
program carries frames between the TAPs.

    edgefl-lab-0: eth0 [tbf up] ---- [tbf down] p0 - b0 - t0 - the program
    edgefl-lab-1: eth0 [tbf up] ---- [tbf down] p1 - b1 - t1 - in edgefl-lab-switch
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edgefl.errors import ConfigError
from edgefl.network import NetworkPlan

PORT = 50051
"""Where each node's process serves, at its own address."""
MTU = 1500
FRAME_SHARE = 1514 / 1448
"""A link's rate is what it carries of a stream; of a full frame's 1,514 bytes, 1,448 belong to the stream."""
QUEUE_S = 0.2
"""Of a link: as much as it carries in this time waits for it, more is dropped."""
BURST_S = 0.005
_LEAST_BURST_BYTES = 4 * 1514
_MOST_NODES = 1000
Command = tuple[str, ...]
Delays = Literal["none", "netem", "switch"]
"""What adds latency and loss."""


@dataclass(frozen=True)
class Seat:
    """One node's place in a lab: its link, as `Access` has it."""

    node: int
    namespace: str
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float
    jitter: float
    loss: float

    @property
    def ip(self) -> str:
        return f"10.77.{(self.node + 1) >> 8}.{(self.node + 1) & 255}"

    @property
    def mac(self) -> str:
        return mac(self.node)

    @property
    def address(self) -> str:
        """Where the node's process serves."""
        return f"{self.ip}:{PORT}"


@dataclass(frozen=True)
class Layout:
    """A lab by its name, with what adds delays."""

    name: str
    seats: tuple[Seat, ...]
    delays: Delays

    @property
    def switch(self) -> str:
        """The namespace in which the nodes' links meet."""
        return f"edgefl-{self.name}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.switch, *(seat.namespace for seat in self.seats))

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "delays": self.delays, "seats": [asdict(seat) for seat in self.seats]}

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Layout:
        return cls(table["name"], tuple(Seat(**seat) for seat in table["seats"]), table["delays"])


def mac(node: int) -> str:
    """The hardware address of a node's interface, by which the switch knows it."""
    return f"02:ef:1a:00:{node >> 8:02x}:{node & 255:02x}"


def layout(network: NetworkPlan, name: str, *, has_netem: bool) -> Layout:
    """The lab of a network. Raises ConfigError for what a lab does not do."""
    if len(network.access) > _MOST_NODES:
        raise ConfigError("fleet.devices", len(network.access), f"at most {_MOST_NODES} nodes in a lab")
    for key, found in (
        ("network.segments", any(access.segment for access in network.access)),
        ("network.caps", network.caps),
        ("network.path", network.path_bytes_per_s != float("inf")),
        ("network.traces", network.traces),
    ):
        if found:
            raise ConfigError(
                key, "given", "leave it out: a lab has a link of its own for each node, no more"
            )
    seats = tuple(
        Seat(i, f"edgefl-{name}-{i}", a.up_bytes_per_s, a.down_bytes_per_s, a.latency_s, a.jitter, a.loss)
        for i, a in enumerate(network.access)
    )
    plain = all(seat.latency_s == 0 and seat.loss == 0 for seat in seats)
    return Layout(name, seats, "none" if plain else "netem" if has_netem else "switch")


def build_commands(lab: Layout) -> Iterator[Command]:
    """The commands that make a lab, in order; the program of the switch is started after them."""
    switch = lab.switch
    yield "ip", "netns", "add", switch
    yield "ip", "-n", switch, "link", "set", "lo", "up"
    if lab.delays != "switch":
        yield "ip", "-n", switch, "link", "add", "br0", "type", "bridge"
        yield "ip", "-n", switch, "link", "set", "br0", "up"
    for seat in lab.seats:
        yield from _seat_commands(lab, seat)


def _seat_commands(lab: Layout, seat: Seat) -> Iterator[Command]:
    own, switch, here = seat.namespace, lab.switch, f"p{seat.node}"
    bridge = f"b{seat.node}" if lab.delays == "switch" else "br0"
    yield "ip", "netns", "add", own
    yield "ip", "-n", own, "link", "set", "lo", "up"
    peer = ("peer", "name", "eth0", "address", seat.mac, "netns", own)
    yield "ip", "-n", switch, "link", "add", here, "type", "veth", *peer
    if lab.delays == "switch":
        yield "ip", "-n", switch, "link", "add", bridge, "type", "bridge"
        yield "ip", "-n", switch, "link", "set", bridge, "addrgenmode", "none"
        yield "ip", "-n", switch, "link", "set", bridge, "up"
    yield "ip", "-n", switch, "link", "set", here, "addrgenmode", "none"
    yield "ip", "-n", own, "link", "set", "eth0", "addrgenmode", "none"
    yield from _shape(own, "eth0", seat.up_bytes_per_s, seat, lab.delays)
    yield from _shape(switch, here, seat.down_bytes_per_s, seat, lab.delays)
    yield "ip", "-n", switch, "link", "set", here, "master", bridge
    yield "ip", "-n", switch, "link", "set", here, "up"
    yield "ip", "-n", own, "addr", "add", f"{seat.ip}/16", "dev", "eth0"
    yield "ip", "-n", own, "link", "set", "eth0", "up"


def _shape(namespace: str, device: str, bytes_per_s: float, seat: Seat, delays: Delays) -> Iterator[Command]:
    """One direction of a link; with netem its latency and loss too, before the rate."""
    place = ("tc", "-n", namespace, "qdisc", "add", "dev", device)
    rate = round(8 * bytes_per_s * FRAME_SHARE)
    burst = round(max(_LEAST_BURST_BYTES, bytes_per_s * BURST_S))
    tbf = ("tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "latency", f"{round(1000 * QUEUE_S)}ms")
    if delays != "netem":
        yield *place, "root", "handle", "1:", *tbf
        return
    late = ("delay", f"{round(1e6 * seat.latency_s)}us", f"{round(1e6 * seat.latency_s * seat.jitter)}us")
    loss = ("loss", f"{100 * seat.loss:g}%") if seat.loss else ()
    under_way = round(bytes_per_s * (QUEUE_S + 2 * seat.latency_s) / 1448) + 100
    yield *place, "root", "handle", "1:", "netem", "limit", str(under_way), *late, *loss
    yield *place, "parent", "1:1", "handle", "10:", *tbf
