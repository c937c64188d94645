"""How nodes are connected, as the experiment file says, and how full their links were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from edgefl.errors import ConfigError
from edgefl.experiment.report.read import RunFiles
from edgefl.experiment.report.units import number
from edgefl.experiment.tables import Network
from edgefl.network import parse_link
from edgefl.network.link import Access


def access_by_node(run: RunFiles) -> dict[int, Access]:
    """The access link of each node of nodes.csv; empty where the experiment file does not say."""
    try:
        links = Network.model_validate(run.experiment.get("network", {})).links
        access = {name: parse_link(link) for name, link in links.items()}
    except (ConfigError, ValidationError):
        return {}
    if not run.experiment:
        return {}
    found = {}
    for node in run.nodes:
        default = access.get("server" if node.role == "server" else "default")
        link = access.get(node.device, default) if node.role != "server" else default
        if link is not None:
            found[node.id] = link
    return found


@dataclass(frozen=True)
class LinkUse:
    """One direction of a node's link: share of what it could have carried in the run, 0 to 1."""

    node: int
    direction: str
    share: float
    access: Access


def link_uses(run: RunFiles, access: Mapping[int, Access]) -> list[LinkUse]:
    """Encoded bytes of each node over what its link carries in the time of the run, the fullest first."""
    found = []
    for node in run.nodes:
        if node.id in access and run.time_s > 0:
            link = access[node.id]
            up, down = link.up_bytes_per_s * run.time_s, link.down_bytes_per_s * run.time_s
            found.append(LinkUse(node.id, "uplink", node.sent_bytes / up, link))
            found.append(LinkUse(node.id, "downlink", node.received_bytes / down, link))
    return sorted(found, key=lambda use: (-use.share, use.node, use.direction))


def mbit_per_s(bytes_per_s: float) -> str:
    """A rate as links are sold.

    >>> mbit_per_s(250_000)
    '2 Mbit/s'
    """
    return f"{number(bytes_per_s * 8e-6)} Mbit/s"
