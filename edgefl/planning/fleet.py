"""Pipelines for the fleet of a run: settings, the plan, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.learning.learner import Learner
from edgefl.nodes import MethodConfig, Node
from edgefl.nodes.node import FleetView
from edgefl.nodes.plan import RunPlan
from edgefl.parameters.crossing import Packing
from edgefl.planning.dapple import NoPlan, Planned, fits, plan_pipeline, with_policy
from edgefl.planning.model_costs import ModelCosts, links_of
from edgefl.planning.pipeline import PipelinePlan, Policy, Stage, simulated
from edgefl.planning.split import refuse_clipping


class PipelineConfig(MethodConfig):
    """How a model is cut into stages; batch and rate are [train]'s."""

    micro_batches: int = Field(default=4, ge=1)
    """M: micro-batches per global batch of [train] batch_size examples."""
    stages: tuple[tuple[int, int], ...] | None = None
    """(blocks up to here, devices) of each stage, devices in order of id; not given: the planner's."""
    plan: Literal["shortest", "balanced"] = "shortest"
    """Which stages the planner takes. shortest: those with which a step takes least. balanced: those of which
    the longest takes least, PipeDream's measure, as a baseline."""
    policy: Literal["PA", "PB"] | None = None
    """DAPPLE's warm-up depth; not given: the faster of the two."""
    recompute: bool = False
    """Whether a stage keeps of an open micro-batch its input alone, and makes the forward pass again when the
    gradient has come: less memory, more work. GPipe's paper does so."""
    copy_every: int | None = Field(default=None, ge=1)
    """Steps between copies of each stage that one device alone holds, with its optimiser's state, at a
    neighbour: when the device is lost, all go back to the last copy, on a new plan for those who are left.
    Not given: none are made, and a run that has lost such a device waits for it."""
    cut_bits: Literal[32, 8] = 32
    """Bits per value between stages; the relative error of 8 is recorded as cut_error."""

    @property
    def packing(self) -> Packing:
        """Of what crosses between stages."""
        return Packing(self.cut_bits)


def policies_of(method: str) -> tuple[Policy, ...]:
    """The schedules that a pipelined method chooses from."""
    return ("gpipe",) if method == "gpipe" else ("PA", "PB")


def plan_for(node: Node, policies: Sequence[Policy]) -> Planned:
    """The plan of the fleet that a program is in, and its seconds per step."""
    return plan_fleet(node.fleet, node.learner, node.config, policies)


def plan_fleet(
    view: FleetView, learner: Learner, config: PipelineConfig, policies: Sequence[Policy]
) -> Planned:
    """The plan that the settings ask for, or the planner's. Raises NoPlan when memory allows none."""
    key = ("pipeline", config, tuple(policies))
    return view.once(key, lambda: _planned(view, learner, config, policies))


def plan_for_living(node: Node, policies: Sequence[Policy], living: Sequence[int]) -> PipelinePlan | None:
    """The plan for those of the fleet that live, ascending; None where their memory allows none.

    As long as each stage of the fleet's plan has a device left, with room for the rows of the lost ones, its
    stages stay; else they are planned anew, whatever stages the settings give.
    """
    view, learner, config = node.fleet, node.learner, node.config
    home = plan_fleet(view, learner, config, policies).plan
    if set(home.members) <= set(living):
        return home

    def found() -> PipelinePlan | None:
        costs = ModelCosts.of(view, learner, config)
        left = home.without([d for d in home.members if d not in living])
        if left is not None and fits(left, costs):
            return _with_best_policy(view, left, costs, config, policies).plan
        try:
            return _planned(view, learner, config, policies, living).plan
        except NoPlan:
            return None

    return view.once(("pipeline of", tuple(living), config, tuple(policies)), found)


def _planned(
    view: FleetView,
    learner: Learner,
    config: PipelineConfig,
    policies: Sequence[Policy],
    living: Sequence[int] | None = None,
) -> Planned:
    """living: those to plan for, whatever stages are given; None: all."""
    ids = view.ids()
    costs = ModelCosts.of(view, learner, config)
    batch, num_micro = view.workload(ids[0]).batch_size, config.micro_batches
    if config.stages is not None and living is None:
        shape = PipelinePlan(_given(config.stages, ids, costs), batch, num_micro, policies[0], ())
        return _with_best_policy(view, shape, costs, config, policies)
    links, balanced = links_of(view, view.link_model), config.plan == "balanced"
    allowed = _allowed(config, policies)
    return plan_pipeline(costs, links, living or ids, batch, num_micro, allowed, balanced=balanced)


def _with_best_policy(
    view: FleetView,
    shape: PipelinePlan,
    costs: ModelCosts,
    config: PipelineConfig,
    policies: Sequence[Policy],
) -> Planned:
    """These stages with the policy that takes least."""
    links = links_of(view, view.link_model)
    plans = [with_policy(shape, costs, policy) for policy in _allowed(config, policies)]
    timed = [Planned(plan, simulated(plan, costs, links).makespan_s) for plan in plans]
    return min(timed, key=lambda planned: planned.step_s)


def _allowed(config: PipelineConfig, policies: Sequence[Policy]) -> Sequence[Policy]:
    return policies if config.policy is None or "gpipe" in policies else (config.policy,)


def _given(stages: tuple[tuple[int, int], ...], ids: Sequence[int], costs: ModelCosts) -> tuple[Stage, ...]:
    found, first, at = [], 0, 0
    for last, count in stages:
        members = tuple(ids[at : at + count])
        found.append(Stage(first, last, members, tuple(costs.speed(d) for d in members)))
        first, at = last, at + count
    return tuple(found)


def refuse_no_pipeline(plan: RunPlan) -> None:
    """Raises ConfigError for micro-batches, stages or a model that make no pipeline; for lack of memory."""
    assert plan.learner is not None
    key, config, learner = f"method.{plan.method.name}", plan.config, plan.learner
    refuse_clipping(plan)
    if learner.model.layout.buffers:
        raise ConfigError(
            "model", learner.model.name, f"a model without batch statistics for {plan.method.name}"
        )
    batch = plan.nodes[0].workload.batch_size
    if config.micro_batches > batch:
        raise ConfigError(f"{key}.micro_batches", config.micro_batches, f"at most batch_size = {batch}")
    if config.stages is not None:
        _refuse_stages(plan, config.stages, batch // config.micro_batches)
    view = FleetView(plan, 0, cast(Any, None))  # nobody is alive before the run, and nobody asks
    try:
        plan_fleet(view, learner, config, policies_of(plan.method.name))
    except NoPlan as none:
        accepted = (
            f"no cut of {learner.model.name} fits the devices: at best {plan.name(none.device)}"
            f" needs {none.needed:.0f} bytes and has {none.has:.0f}"
        )
        raise ConfigError("fleet.devices", plan.nodes[none.device].profile.name, accepted) from None


def _refuse_stages(plan: RunPlan, stages: tuple[tuple[int, int], ...], micro_rows: int) -> None:
    assert plan.learner is not None
    key, blocks = f"method.{plan.method.name}.stages", len(plan.learner.model.blocks)
    ends, counts = [end for end, _ in stages], [count for _, count in stages]
    if not ends or ends[-1] != blocks or any(b <= a for a, b in zip([0, *ends], ends, strict=False)):
        raise ConfigError(key, stages, f"rising ends of which the last is {blocks}, the number of blocks")
    if min(counts) < 1 or sum(counts) > len(plan.nodes):
        raise ConfigError(key, stages, f"at least 1 device each, at most {len(plan.nodes)} together")
    if max(counts) > micro_rows:
        raise ConfigError(key, stages, f"at most {micro_rows} devices each: a micro-batch has so many rows")
    view = FleetView(plan, 0, cast(Any, None))
    costs = ModelCosts.of(view, plan.learner, plan.config)
    for stage in _given(stages, view.ids(), costs):
        for d in stage.devices:
            needed = costs.fixed_bytes(stage.first, stage.last, 1) + costs.kept_bytes(
                stage.first, stage.last, 1
            )
            if needed > costs.memory_bytes(d):
                accepted = f"{plan.name(d)} needs {needed:.0f} bytes and has {costs.memory_bytes(d):.0f}"
                raise ConfigError(key, stages, accepted)
