"""Prague's static schedule (Luo et al. 2020; as in the code of laekov/preduce): groups without a generator.

As Prague (prague.py), but every worker computes its group from its rank and its step: nobody is asked.
Machines have m workers; rank r is number r mod m of machine r div m. At odd steps each machine averages; at
even step s the workers number h = (s/2) mod m of all machines do, its heads, and the rest of each machine.
For m = 4 the table of the code is taken, in which one of the rest stays alone: heads are number 0 at step 0
of 4, {2,3} meet and 1 is alone; heads are number 1 at step 2, {0,3} meet and 2 is alone.

Choices: other m than 4; a flat fleet is cut into machines of m consecutive ranks. A worker that is gone stops
the run: nobody is there to form other groups.
"""

from __future__ import annotations

from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.methods.collective.prague import steps
from edgefl.nodes import Faults, Method, MethodConfig, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.patterns.all_reduce import Chunk, all_reduce_mean
from edgefl.patterns.reports import ALL_FINITE

_ALONE = {0: 1, 2: 2}
"""m = 4: which number stays alone at an even step of the period."""
_HEADS = {0: 0, 2: 1}


class PragueStaticConfig(MethodConfig):
    """The machines; the gradient and the optimiser are [train]'s."""

    workers_per_machine: int = Field(default=4, ge=1)
    """m: consecutive workers on one machine."""


def static_group(rank: int, step: int, n: int, m: int) -> tuple[int, ...]:
    """The ranks, ascending, that rank averages with at a step; n workers, m per machine (a divisor of n).

    >>> [static_group(2, s, 8, 4) for s in range(4)]
    [(2, 3), (0, 1, 2, 3), (2,), (0, 1, 2, 3)]
    """
    machine, number = divmod(rank, m)
    first = machine * m
    if step % 2:
        return tuple(range(first, first + m))
    s = step % 4 if m == 4 else step
    head = _HEADS[s] if m == 4 else s // 2 % m
    if number == head:
        return tuple(range(head, n, m))
    alone = _ALONE[s] if m == 4 else None
    if number == alone:
        return (rank,)
    return tuple(first + k for k in range(m) if k not in (head, alone))


async def worker(node: Node) -> Vector:
    return await steps(node, _scheduled)


async def _scheduled(node: Node, x: Vector, k: int) -> Vector:
    workers = node.fleet.ids("worker")
    ranks = static_group(workers.index(node.id), k, len(workers), node.config.workers_per_machine)
    return await all_reduce_mean(node, [workers[r] for r in ranks], x, weight=None, tag=k)


def _refuse_impossible(plan: RunPlan) -> None:
    n, m = len(plan.nodes), plan.config.workers_per_machine
    if n % m:
        key = "method.prague-static.workers_per_machine"
        raise ConfigError(key, m, f"a divisor of the number of workers, {n}")


METHOD = Method(
    name="prague-static",
    title="Partial all-reduce on a fixed schedule",
    paper="Luo, He, Zhuo, Qian 2020, https://doi.org/10.1145/3373376.3378499",
    roles={"worker": worker},
    messages=(Chunk,),
    config=PragueStaticConfig,
    ends_with=("worker",),
    needs="complete",
    evaluates="mean",
    prepare=_refuse_impossible,
    tolerates=Faults(partitions=True),
    invariants=(ALL_FINITE,),
)
