"""Seven systems of seven papers as node programs on toy problems: what the seam is there to carry.

Each has a page of its own in the modules beside this one: its messages, a coroutine per role, and what must
come out. SYSTEMS lists them, so that every runtime can run the same table. Work is Call with module-level
functions and a stated cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import systems_asynchronous as asynchronous
import systems_split as split
import systems_streams as streams
import systems_switch as switch

from edgefl.nodes import Message, Program
from edgefl.patterns.all_reduce import Chunk


@dataclass(frozen=True)
class System:
    """programs: one per node, by id. ends_with: whose return ends the run. check: of the results by node."""

    name: str
    programs: tuple[Program, ...]
    messages: tuple[type[Message], ...]
    check: Callable[[Mapping[int, Any]], None]
    ends_with: tuple[int, ...]


WORKERS = tuple(range(8))
SYSTEMS = (
    System(
        "fedbuff",
        (
            partial(asynchronous.fedbuff_server, buffer_size=4, num_updates=40),
            *[asynchronous.fedbuff_client] * 4,
        ),
        (asynchronous.Job, asynchronous.Delta),
        asynchronous.check_fedbuff,
        (0,),
    ),
    System(
        "prague",
        (
            *[partial(asynchronous.prague_worker, generator=8, steps=10)] * 8,
            partial(asynchronous.group_generator, workers=WORKERS, size=3, gap=4, steps=10),
        ),
        (asynchronous.Request, asynchronous.Group, asynchronous.Done, Chunk),
        asynchronous.check_prague,
        WORKERS,
    ),
    System(
        "switchml",
        (
            *[partial(switch.switch_worker, aggregator=4, slots=4, repeats=3)] * 4,
            partial(switch.switch, workers=(0, 1, 2, 3), num_slots=4),
        ),
        (switch.Packet, switch.Sum),
        switch.check_switchml,
        (0, 1, 2, 3),
    ),
    System(
        "dapple",
        (partial(split.dapple_stage, num_stages=4, num_micro=16),) * 4,
        (split.Activation, split.Gradient),
        split.check_dapple,
        (0, 1, 2, 3),
    ),
    System(
        "edgesplit",
        (
            partial(split.split_server, rounds=20, num_batches=3, rate=0.1),
            *[partial(split.split_client, num_batches=3, rate=0.1)] * 2,
        ),
        (split.Front, split.Smashed, split.CutGradient, split.Trained),
        split.check_edgesplit,
        (0,),
    ),
    System(
        "domkl",
        (partial(streams.domkl_learner, n=5, rounds=200, eta=1.0, rho=0.3),) * 5,
        (streams.Theta,),
        streams.check_domkl,
        (0, 1, 2, 3, 4),
    ),
    System(
        "darl1n",
        (partial(streams.darl1n_controller, iterations=4), *[streams.darl1n_learner] * 3),
        (streams.Policies, streams.Policy),
        streams.check_darl1n,
        (0,),
    ),
)
