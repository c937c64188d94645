"""Where the processes of a run on this machine live, when not all on loopback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from edgefl.network import NetworkPlan


@dataclass(frozen=True)
class Hosts:
    """A network of their own for the processes of a run, one per node.

    addresses: "host:port" by node. command(node, command): how a command is run where that node lives.
    entered(): inside, this process is where node 0 lives. about: what run.json says of it.
    """

    addresses: tuple[str, ...]
    command: Callable[[int, Sequence[str]], list[str]]
    entered: Callable[[], AbstractContextManager[None]]
    about: Mapping[str, str]


Housing = Callable[[NetworkPlan], AbstractContextManager[Hosts]]
"""Makes room for the nodes of a network, for as long as a block runs."""
