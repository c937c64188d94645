"""The memory that each node of a split method needs at once, before anything runs.

A client: its parts. A server: the whole model, a rear per client or one for all, and the batches that it
works on together. A device of a pipeline: its stage, and the micro-batches between their two passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from edgefl.errors import ConfigError
from edgefl.learning.learner import Learner
from edgefl.learning.model import Model
from edgefl.learning.work_costs import stage_backward_cost
from edgefl.nodes.node import FleetView
from edgefl.nodes.plan import RunPlan
from edgefl.planning.assign import planned_cuts
from edgefl.planning.fleet import plan_fleet, policies_of
from edgefl.planning.model_costs import ModelCosts
from edgefl.planning.split import front_memory_bytes

Needs = Mapping[int, int]
"""Bytes by node."""


def needs_with_one_rear(plan: RunPlan) -> Needs:
    """One cut for all, and one rear that takes one client's batch at a time."""
    learner, batch = _of(plan)
    head = getattr(plan.config, "head_blocks", 0)
    cut, last = plan.config.cut, len(learner.model.blocks)
    rear = learner.model.stage(cut, last - head)
    return _star(plan, [cut] * len(plan.ids("client")), _rears_bytes(learner, [rear], batch, 1), head)


def needs_with_a_union(plan: RunPlan) -> Needs:
    """One cut for all, and one rear that takes the batches of all clients together."""
    learner, batch = _of(plan)
    cut, clients = plan.config.cut, len(plan.ids("client"))
    rear = learner.model.stage(cut, len(learner.model.blocks))
    return _star(plan, [cut] * clients, _rears_bytes(learner, [rear], batch * clients, 1))


def needs_with_own_rears(plan: RunPlan) -> Needs:
    """One cut for all, and a rear per client that take their batches one after the other."""
    learner, batch = _of(plan)
    cut, clients = plan.config.cut, len(plan.ids("client"))
    rear = learner.model.stage(cut, len(learner.model.blocks))
    return _star(plan, [cut] * clients, _rears_bytes(learner, [rear] * clients, batch, 1))


def needs_with_planned_cuts(plan: RunPlan) -> Needs:
    """A planned cut for each client, and a rear for each that all work at once."""
    learner, batch = _of(plan)
    view = FleetView(plan, 0, cast(Any, None))  # nobody is alive before the run, and nobody asks
    cuts, last = planned_cuts(plan, view), len(learner.model.blocks)
    rears = [learner.model.stage(cut, last) for cut in cuts if cut < last]
    return _star(plan, cuts, _rears_bytes(learner, rears, batch, len(rears)))


def needs_of_stages(plan: RunPlan) -> Needs:
    """The planned stages; a device that is left out needs nothing."""
    learner, _ = _of(plan)
    view = FleetView(plan, 0, cast(Any, None))
    found = plan_fleet(view, learner, plan.config, policies_of(plan.method.name)).plan
    costs = ModelCosts.of(view, learner, plan.config)
    size = -(-found.batch // found.num_micro)
    needs = dict.fromkeys(view.ids(), 0)
    for stage, open_ones in zip(found.stages, found.warmup, strict=True):
        for device, (a, b) in zip(stage.devices, stage.rows(size), strict=True):
            fixed = costs.fixed_bytes(stage.first, stage.last, b - a)
            needs[device] = int(fixed + open_ones * costs.kept_bytes(stage.first, stage.last, b - a))
    if plan.config.copy_every is not None:
        for stage in found.stages:
            version = int(costs.version_bytes(stage.first, stage.last))
            for device in stage.devices:
                needs[device] += version  # the one that all may have to go back to
                if (keeper := found.keepers.get(device)) is not None:
                    needs[keeper] += 3 * version  # two copies, and one that is on its way
    return needs


def refuse_beyond_memory(plan: RunPlan, needs: Needs) -> None:
    """Raises ConfigError for the first node that needs more than it has."""
    for i, size in needs.items():
        profile = plan.nodes[i].profile
        if size > profile.memory_bytes:
            accepted = (
                f"{plan.name(i)} needs {size / 1e6:,.1f} MB for its part of the model and has"
                f" {profile.memory_bytes / 1e6:,.1f} MB"
            )
            key = "fleet.roles.server" if plan.nodes[i].role == "server" else "fleet.devices"
            raise ConfigError(key, profile.name, accepted)


def _of(plan: RunPlan) -> tuple[Learner, int]:
    assert plan.learner is not None
    return plan.learner, max(node.workload.batch_size for node in plan.nodes)


def _star(plan: RunPlan, cuts: Sequence[int], server_bytes: int, head_blocks: int = 0) -> Needs:
    assert plan.learner is not None
    needs = {0: server_bytes}
    for k, cut in zip(plan.ids("client"), cuts, strict=True):
        batch = plan.nodes[k].workload.batch_size
        needs[k] = front_memory_bytes(plan.learner, cut, batch, head_blocks)
    return needs


def _rears_bytes(learner: Learner, rears: Sequence[Model], batch: int, at_once: int) -> int:
    """The whole model, the rears with their optimisers' states, and the largest batches under way."""
    states = learner.optimizer.state_sizes.count(None)
    kept = sum((1 + states) * rear.counts.parameter_bytes for rear in rears)
    working = sorted(
        stage_backward_cost(rear, batch, True, kept=False).memory_bytes - rear.counts.parameter_bytes
        for rear in rears
    )
    return learner.model.counts.parameter_bytes + kept + sum(working[len(working) - at_once :])
