"""A plan in words, before anything runs: cuts and shares, or stages and bubbles."""

from __future__ import annotations

from typing import Any, cast

from edgefl.nodes.node import FleetView
from edgefl.nodes.plan import RunPlan
from edgefl.planning.assign import SplitFleet, edgesplit_plan, hsfl_plan
from edgefl.planning.fleet import plan_fleet, policies_of
from edgefl.planning.model_costs import ModelCosts, links_of
from edgefl.planning.pipeline import simulated


def show_plan(plan: RunPlan) -> list[str]:
    """Lines that say what a method's planner has planned for a run; none for a method that plans nothing."""
    if plan.learner is None:
        return []
    view = FleetView(plan, 0, cast(Any, None))  # nobody is alive before the run, and nobody asks
    if plan.method.name in ("dapple", "gpipe"):
        return _pipeline(plan, view)
    if plan.method.name in ("edgesplit", "hsfl", "hsfl-layerwise"):
        return _cuts(plan, view)
    return []


def _pipeline(plan: RunPlan, view: FleetView) -> list[str]:
    assert plan.learner is not None
    found = plan_fleet(view, plan.learner, plan.config, policies_of(plan.method.name))
    costs = ModelCosts.of(view, plan.learner, plan.config)
    run = simulated(found.plan, costs, links_of(view, view.link_model))
    lines = [
        f"a step of {found.plan.batch} examples in {found.plan.num_micro} micro-batches: {found.step_s:.4g} s"
    ]
    for s, stage in enumerate(found.plan.stages):
        lines.append(
            f"stage {s}: blocks {stage.first} to {stage.last - 1}, {found.plan.warmup[s]} micro-batches ahead"
        )
        lines += [f"  {plan.name(d)}: bubble {run.bubble(d):.0%}" for d in stage.devices]
    if plan.config.copy_every is not None:
        alone = [stage for stage in found.plan.stages if stage.devices[0] in found.plan.keepers]
        size = sum(costs.version_bytes(stage.first, stage.last) for stage in alone)
        lines.append(
            f"copies of stages of one device: {size / 1e3:.4g} kB every {plan.config.copy_every} steps"
        )
    spare = [plan.name(i) for i in view.ids() if found.plan.place(i) is None]
    return lines + ([f"without a stage: {', '.join(spare)}"] if spare else [])


def _cuts(plan: RunPlan, view: FleetView) -> list[str]:
    assert plan.learner is not None
    fleet = SplitFleet.of(view, plan.learner, plan.seed)
    blocks = len(plan.learner.model.blocks)
    if plan.method.name == "edgesplit":
        cut_plan = edgesplit_plan(fleet, plan.config)
        cuts, rates, round_s = cut_plan.cuts, cut_plan.rates, cut_plan.round_s
        servers = (1 / len(cuts),) * len(cuts)
    else:
        found = hsfl_plan(fleet, plan.config, moves_front=plan.method.name == "hsfl-layerwise")
        cuts, servers, round_s = found.cuts, found.shares.server, found.shares.round_s
        rates = tuple(x * fleet.capacity_bytes_per_s for x in found.shares.link)
    lines = [f"a round: {round_s:.4g} s"]
    for device, cut, rate, server in zip(fleet.devices, cuts, rates, servers, strict=True):
        lines.append(
            f"{device.name}: {cut} of {blocks} blocks, {rate / 1e3:.4g} kB/s, {server:.1%} of the server"
        )
    return lines
