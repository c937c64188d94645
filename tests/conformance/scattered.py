"""Methods of peers whose nodes start at models of their own and train at a rate that moves nothing.

What is left is the averaging, and what it keeps can be seen from outside: the mean of all models, or the span
of each of their values. As a file of a user's own, so that each process of a run can load it.
"""

from __future__ import annotations

from pathlib import Path

KEEP_THE_MEAN = (
    "ad-psgd", "choco-sgd", "d-psgd", "delay-by-one", "h-adpsgd", "h-ring-psgd", "moshpit-sgd", "prague",
    "prague-static", "sgp",
)  # fmt: skip
STAY_WITHIN = ("combo", "divshare", "divshare-adpsgd", "divshare-swift", "swift")
"""Their averages have weights that sum to 1 at each node, and nothing more."""
STILL = "train.learning_rate=1e-30"
"""A rate at which a step changes no float32 value of these models."""
SITES = ("delay-by-one", "h-adpsgd", "h-ring-psgd")
"""Two learners of a site hold one model, also at the start."""
TEXT = '''
import dataclasses

import torch

from edgefl.nodes import Check, Faults
from edgefl.nodes.registry import find_method
from edgefl.parameters import Vector

FOUND = find_method("{name}")


class Stand:
    """Stands for another thing in all but some attributes."""

    def __init__(self, inner, **own):
        self._inner = inner
        self.__dict__.update(own)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def start(size, node):
    """Standard normal values, keyed by the site."""
    return torch.randn(size, generator=torch.Generator().manual_seed(100 + node // {learners}))


def scattered(program):
    async def run(node):
        x = node.model.init()
        model = Stand(node.model, init=lambda: x.with_values(start(x.layout.size, node.id)))
        return await program(Stand(node, model=model))

    return run


def ends_and_starts(outcome):
    models = {{i: x.values.double() for i, x in outcome.results.items() if isinstance(x, Vector)}}
    ends = torch.stack(list(models.values()))
    return ends, torch.stack([start(ends.shape[1], i).double() for i in models])


def mean_stays(outcome):
    ends, starts = ends_and_starts(outcome)
    off = float((ends.mean(0) - starts.mean(0)).abs().max())
    return off <= 1e-5 or f"it is off by {{off:.3g}} somewhere"


def stays_within(outcome):
    ends, starts = ends_and_starts(outcome)
    over = float(torch.maximum(ends - starts.amax(0), starts.amin(0) - ends).max())
    return over <= 1e-5 or f"a value is {{over:.3g}} outside of what it was at the start"


KEPT = Check("the mean stays", mean_stays) if {keeps_mean} else Check("values stay within", stays_within)
METHOD = dataclasses.replace(
    FOUND,
    roles={{role: scattered(p) if role != "generator" else p for role, p in FOUND.roles.items()}},
    tolerates=Faults(partitions={partitions}),
    invariants=(*FOUND.invariants, KEPT),
)
'''


def write_scattered(folder: Path, name: str) -> str:
    """Write the file; returns its name.

    All nodes must live to the end: no crash is tolerated. Nor is a partition where a method leaves out who is
    late, as Moshpit does.
    """
    file = folder / "scattered.py"
    more = {"keeps_mean": name in KEEP_THE_MEAN, "partitions": name != "moshpit-sgd"}
    file.write_text(TEXT.format(name=name, learners=2 if name in SITES else 1, **more))
    return str(file)
