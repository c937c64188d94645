"""Local training in which each step trains a corner of the model: its first units, and no others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgefl.learning.cost import Cost
from edgefl.learning.learner import Learner, check_steps, value_of
from edgefl.learning.narrowing import SubModel
from edgefl.learning.work import LocalSGD, Trained


@dataclass(frozen=True, eq=False)
class OrderedSGD(LocalSGD):
    """LocalSGD whose step i trains corners[i] alone: what lies outside is not touched, not even by decay.

    model: the one that `parameters` are of, limit.model. limit, corners: sub-models of one whole; each
    corner lies in the limit. A coordinate's momentum moves in the steps that train it. Proximal terms,
    corrections and carried states are not for it. Returns Trained; costs what each step's corner costs.
    Source: FjORD, ordered dropout (Horvath et al. 2021, https://arxiv.org/abs/2102.13451).
    """

    limit: SubModel = field(kw_only=True)
    corners: tuple[SubModel, ...] = field(kw_only=True)

    def cost(self, learner: Learner) -> Cost:
        steps = [
            LocalSGD(
                self.parameters,
                self.data,
                self.round,
                self.workload,
                part=range(i, i + 1),
                model=corner.model,
            ).cost(learner)
            for i, corner in enumerate(self.corners)
        ]
        return Cost(
            flops=sum(c.flops for c in steps),
            traffic_bytes=sum(c.traffic_bytes for c in steps),
            num_steps=len(steps),
            memory_bytes=self.parameters.nbytes + max(c.memory_bytes for c in steps),
        )

    def run(self, learner: Learner) -> Trained:
        check_steps(self.steps, self.data)
        optimizer, rate = learner.optimizer, self.rate(learner)
        values = self.parameters.values.to(learner.device, copy=True)
        state = optimizer.zeros((), self.limit.model.layout, learner.device)
        places = {
            id(c): torch.searchsorted(self.limit.index, c.index).to(values.device) for c in self.corners
        }
        losses = []
        for step, corner in zip(self.steps, self.corners, strict=True):
            place, scratch = places[id(corner)], learner.scratch(corner.model)
            scratch.values.copy_(values[place])
            losses.append(scratch.loss_and_gradient(self.data.batch(step, self.workload.batch_size)))
            optimizer.clip_(scratch.gradient)
            here = tuple(t[place] if t.shape == values.shape else t for t in state)
            optimizer.step_(scratch.values, scratch.gradient, here, rate)
            values[place] = scratch.values
            for kept, new in zip(state, here, strict=True):
                _put(kept, place, new)
        loss = float(torch.stack(losses).mean())
        trained = self.parameters.with_values(value_of(values))
        return Trained(trained, loss, len(losses), tuple(map(value_of, state)) or None)


def _put(kept: Tensor, place: Tensor, new: Tensor) -> None:
    """Write a corner's part of the state back; what counts steps has been changed in place."""
    if new is not kept:
        kept[place] = new
