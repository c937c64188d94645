"""What a model's blocks cost on a fleet: the figures that pipelines are planned by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from edgefl.devices import DeviceProfile
from edgefl.learning.cost import duration_s
from edgefl.learning.learner import Learner
from edgefl.learning.work_costs import stage_backward_cost, stage_forward_cost
from edgefl.nodes.node import FleetView
from edgefl.parameters.crossing import WHOLE, Packing
from edgefl.planning.simulate import Links


class PipelineSettings(Protocol):
    """What of a pipeline's settings its costs go by."""

    recompute: bool

    @property
    def packing(self) -> Packing: ...


class ModelCosts:
    """Costs of the stages of a learner's model on devices by node id; seconds of the very work items.

    packing: of what crosses between stages. recompute: of an open micro-batch its input alone is kept, and
    its backward pass begins with the forward pass. Fixed memory: the parameters of two versions, gradients
    and their sum, two versions of the state.
    """

    @classmethod
    def of(cls, view: FleetView, learner: Learner, config: PipelineSettings) -> ModelCosts:
        """Of a run's fleet, as its settings have it."""
        profiles = {i: view.profile(i) for i in view.ids()}
        return cls(learner, profiles, config.packing, recompute=config.recompute)

    def __init__(
        self,
        learner: Learner,
        profiles: Mapping[int, DeviceProfile],
        packing: Packing = WHOLE,
        *,
        recompute: bool = False,
    ) -> None:
        self._packing, self._recompute = packing, recompute
        self._learner, self._profiles = learner, dict(profiles)
        self._model = learner.model
        self.num_layers = len(learner.model.blocks)
        self._known: dict[tuple[str, int, int, int, int], float] = {}

    def forward_s(self, first: int, last: int, device: int, rows: int) -> float:
        return self._seconds("F", first, last, device, rows)

    def backward_s(self, first: int, last: int, device: int, rows: int) -> float:
        return self._seconds("B", first, last, device, rows)

    def _seconds(self, kind: str, first: int, last: int, device: int, rows: int) -> float:
        key = (kind, first, last, device, rows)
        seconds = self._known.get(key)
        if seconds is None:
            stage = self._model.stage(first, last)
            if kind == "F":
                cost = stage_forward_cost(stage, rows)
            else:
                cost = stage_backward_cost(stage, rows, first > 0, kept=not self._recompute)
            seconds = self._known[key] = duration_s(cost, self._profiles[device])
        return seconds

    def cut_bytes(self, layer: int, rows: int) -> float:
        return self._packing.size_bytes(rows * self._model.block_counts[layer - 1].output_bytes // 4)

    def parameter_bytes(self, first: int, last: int) -> float:
        return self._model.stage(first, last).counts.parameter_bytes

    def version_bytes(self, first: int, last: int) -> float:
        """A stage's parameters with the optimiser's state."""
        return (1 + self._learner.optimizer.state_sizes.count(None)) * self.parameter_bytes(first, last)

    def fixed_bytes(self, first: int, last: int, rows: int) -> float:
        fixed = 2 * self.parameter_bytes(first, last) + 2 * self.version_bytes(first, last)
        return fixed + (self._saved_bytes(first, last, rows) if self._recompute else 0)

    def kept_bytes(self, first: int, last: int, rows: int) -> float:
        if not self._recompute:
            return self._saved_bytes(first, last, rows)
        shape = self._model.block_counts[first - 1].output_shape if first else self._model.input_shape
        return 4 * rows * math.prod(shape)

    def _saved_bytes(self, first: int, last: int, rows: int) -> float:
        """Of a forward pass, for the backward pass."""
        return rows * self._model.stage(first, last).counts.saved_bytes

    def memory_bytes(self, device: int) -> float:
        return self._profiles[device].memory_bytes

    def speed(self, device: int) -> float:
        return self._profiles[device].compute_flops


def links_of(view: FleetView, model: str) -> Links:
    """The planned network of a fleet. model: the run's link model."""
    ids = view.ids()
    access = {i: view.access(i) for i in ids}
    return Links(
        up={i: a.up_bytes_per_s for i, a in access.items()},
        down={i: a.down_bytes_per_s for i, a in access.items()},
        latency_s={i: a.latency_s for i, a in access.items()},
        copy_bytes_per_s={i: view.profile(i).memory_bytes_per_s for i in ids},
        model="fifo" if model == "fifo" else "fair",
        caps={(i, j): view.cap(i, j) for i in ids for j in ids if i != j and view.cap(i, j) < math.inf},
        segment_of={i: a.segment for i, a in access.items() if a.segment is not None},
        segments=view.segments,
    )
