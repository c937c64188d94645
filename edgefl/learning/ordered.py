"""Local training in which each step trains a corner of the model: its first units, and no others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgefl.data import Batch
from edgefl.learning import tasks
from edgefl.learning.cost import Cost, in_turn
from edgefl.learning.learner import Learner, Scratch, check_steps, value_of
from edgefl.learning.narrowing import SubModel
from edgefl.learning.work import LocalSGD, Trained
from edgefl.learning.work_costs import batch_sizes, gradient_cost, num_examples_in


@dataclass(frozen=True)
class Teaching:
    """How the widest corner teaches narrow ones. alpha: its share in their loss, above 0 and at most 1;
    temperature: T, above 0, by which the logits of both are divided."""

    alpha: float
    temperature: float = 1.0


@dataclass(frozen=True, eq=False)
class OrderedSGD(LocalSGD):
    """LocalSGD whose step i trains corners[i] alone: what lies outside is not touched, not even by decay.

    model: the one that `parameters` are of, limit.model. limit, corners: sub-models of one whole; each
    corner lies in the limit. A coordinate's momentum moves in the steps that train it. Proximal terms,
    corrections and carried states are not for it. Returns Trained; costs what each step's corner costs.
    teaching: a step whose corner is narrower than the limit is one step down the sum of the limit's own loss
    and (1 - alpha) the corner's loss + alpha T^2 KL(limit || corner), the limit's output taken as given; so
    it trains the whole limit, costs both, and the limit's loss is the one that is told.
    Source: FjORD, ordered dropout (Horvath et al. 2021, https://arxiv.org/abs/2102.13451).
    """

    limit: SubModel = field(kw_only=True)
    corners: tuple[SubModel, ...] = field(kw_only=True)
    teaching: Teaching | None = field(default=None, kw_only=True)

    def cost(self, learner: Learner) -> Cost:
        steps = [self._step_cost(learner, i, corner) for i, corner in enumerate(self.corners)]
        return in_turn(steps, self.parameters.nbytes + max(c.memory_bytes for c in steps))

    def _step_cost(self, learner: Learner, i: int, corner: SubModel) -> Cost:
        taught = self._is_taught(corner)
        step = LocalSGD(
            self.parameters,
            self.data,
            self.round,
            self.workload,
            part=range(i, i + 1),
            model=self.limit.model if taught else corner.model,
        ).cost(learner)
        if not taught:
            return step
        batch_size, at = self.workload.batch_size, self.steps[i]
        num_examples = num_examples_in(batch_sizes(len(self.data), batch_size, range(at, at + 1)))
        narrow = gradient_cost(corner.model, num_examples, batch_size)
        return in_turn((step, narrow), step.memory_bytes + narrow.memory_bytes)

    def _is_taught(self, corner: SubModel) -> bool:
        return self.teaching is not None and corner.model is not self.limit.model

    def run(self, learner: Learner) -> Trained:
        check_steps(self.steps, self.data)
        optimizer, rate = learner.optimizer, self.rate(learner)
        values = self.parameters.values.to(learner.device, copy=True)
        state = optimizer.zeros((), self.limit.model.layout, learner.device)
        places = {
            id(c): torch.searchsorted(self.limit.index, c.index).to(values.device)
            for c in (self.limit, *self.corners)
        }
        losses = []
        for step, corner in zip(self.steps, self.corners, strict=True):
            batch = self.data.batch(step, self.workload.batch_size)
            place = places[id(corner)]
            scratch = learner.scratch(corner.model)
            scratch.values.copy_(values[place])
            if self._is_taught(corner):
                losses.append(self._taught(learner.scratch(self.limit.model), scratch, values, place, batch))
                place, scratch = places[id(self.limit)], learner.scratch(self.limit.model)
            else:
                losses.append(scratch.loss_and_gradient(batch))
            optimizer.clip_(scratch.gradient)
            here = tuple(t[place] if t.shape == values.shape else t for t in state)
            optimizer.step_(scratch.values, scratch.gradient, here, rate)
            values[place] = scratch.values
            for kept, new in zip(state, here, strict=True):
                _put(kept, place, new)
        loss = float(torch.stack(losses).mean())
        trained = self.parameters.with_values(value_of(values))
        return Trained(trained, loss, len(losses), tuple(map(value_of, state)) or None)

    def _taught(self, wide: Scratch, narrow: Scratch, values: Tensor, place: Tensor, batch: Batch) -> Tensor:
        """Set wide.gradient to that of both losses; returns the limit's."""
        assert self.teaching is not None
        alpha = self.teaching.alpha
        wide.values.copy_(values)
        output, loss = wide.output_and_loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        own, hard = narrow.output_and_loss(batch)
        soft = tasks.teaching_loss(own, output.detach(), self.teaching.temperature)
        ((1 - alpha) * hard + alpha * soft).backward()  # type: ignore[no-untyped-call]
        wide.gradient[place] += narrow.gradient
        return loss.detach()


def _put(kept: Tensor, place: Tensor, new: Tensor) -> None:
    """Write a corner's part of the state back; what counts steps has been changed in place."""
    if new is not kept:
        kept[place] = new
