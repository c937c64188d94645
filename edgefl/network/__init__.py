"""Topologies and mixing matrices; links, how flows share them, and the plan of a run's network."""

from edgefl.network.graphs import TopologyConfig, make_topology
from edgefl.network.link import Access
from edgefl.network.links import link, links, parse_link, parse_rate, parse_time
from edgefl.network.maxmin import max_min
from edgefl.network.measured import MeasuredLink
from edgefl.network.mixing import MixingMatrix, make_mixing, metropolis, uniform
from edgefl.network.plan import LinkModel, NetworkPlan
from edgefl.network.topology import Topology
from edgefl.network.traces import Trace, drawn_trace, read_trace

__all__ = [
    "Access",
    "LinkModel",
    "MeasuredLink",
    "MixingMatrix",
    "NetworkPlan",
    "Topology",
    "TopologyConfig",
    "Trace",
    "drawn_trace",
    "link",
    "links",
    "make_mixing",
    "make_topology",
    "max_min",
    "metropolis",
    "parse_link",
    "parse_rate",
    "parse_time",
    "read_trace",
    "uniform",
]
