"""A run's processes in a lab: each node's in its namespace, the one that leads entering node 0's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from edgefl.experiment.hosts import Hosts
from edgefl.lab import system
from edgefl.lab.build import kept_up
from edgefl.lab.state import NAME
from edgefl.network import NetworkPlan


@contextmanager
def lab_hosts(network: NetworkPlan, name: str = NAME) -> Iterator[Hosts]:
    """Where the processes of a run with this network live, for as long as the block runs.

    Raises as `kept_up` does.
    """
    with kept_up(network, name) as made:
        seats = made.seats
        yield Hosts(
            addresses=tuple(seat.address for seat in seats),
            command=lambda node, command: system.inside(seats[node].namespace, command),
            entered=partial(system.entered, seats[0].namespace),
            about={"rates": "tbf", "delays": made.delays},
        )
