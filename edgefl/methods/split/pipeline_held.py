"""The parts of a model that a device of a pipeline holds: its stage after some steps, and others' copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from edgefl.learning.model import Model
from edgefl.learning.optimizer import Optimizer
from edgefl.methods.split.pipeline_messages import Place, Portion
from edgefl.patterns.cuts import Part, State


class Held:
    """Parts by (first block, last block, steps made). After no step everybody holds the initial model."""

    def __init__(self, model: Model, optimizer: Optimizer, saved: Sequence[Any] = ()) -> None:
        """saved: as `saved` gave it."""
        self._model, self._optimizer = model, optimizer
        self.parts = {(first, last, step): Part(w, state) for first, last, step, w, state in saved}

    def saved(self) -> list[tuple[Any, ...]]:
        """What a node can save."""
        return [(*place, part.parameters, part.state) for place, part in self.parts.items()]

    def __getitem__(self, place: Place) -> Part:
        return self.parts[place]

    def __setitem__(self, place: Place, part: Part) -> None:
        self.parts[place] = part

    def keep(self, wanted: Callable[[Place], bool]) -> None:
        """Drop all but the places that are wanted."""
        self.parts = {place: part for place, part in self.parts.items() if wanted(place)}

    def take(self, m: Portion) -> None:
        """Hold what another device has sent."""
        self.parts[m.first, m.last, m.step] = Part(m.parameters, m.state)

    def piece(self, first: int, last: int, step: int, came: Sequence[Portion] = ()) -> Part:
        """These blocks after so many steps: of `came` where they are in there, else of what is held.

        Raises KeyError for a block that is in neither.
        """
        if not came and (whole := self.parts.get((first, last, step))) is not None:
            return whole
        blocks = [self._block(b, step, came) for b in range(first, last)]
        stage = self._model.stage(first, last)
        states = [block.state for block in blocks if block.state is not None]
        return Part(stage.join(*(block.parameters for block in blocks)), self._joined(states))

    def _block(self, b: int, step: int, came: Sequence[Portion]) -> Part:
        sent = [((m.first, m.last, m.step), Part(m.parameters, m.state)) for m in came]
        for (first, last, k), part in (*sent, *self.parts.items()):
            if k == step and first <= b < last:
                return self._cut(part, first, last, b)
        if step == 0:
            return Part(self._model.cut(self._model.init(), b, b + 1))
        raise KeyError((b, step))

    def _cut(self, part: Part, first: int, last: int, b: int) -> Part:
        """Block b of a part, with its own share of the optimiser's state."""
        stage = self._model.stage(first, last)
        where = stage.block_slice(b - first, b - first + 1)
        state = part.state
        if state is not None:
            pairs = zip(state, self._optimizer.state_sizes, strict=True)
            state = tuple(t[where].clone() if size is None else t for t, size in pairs)
        return Part(stage.cut(part.parameters, b - first, b - first + 1), state)

    def _joined(self, states: Sequence[tuple[torch.Tensor, ...]]) -> State:
        """The state of blocks together; what is not one value per parameter is the same for all."""
        if not states:
            return None
        columns = zip(zip(*states, strict=True), self._optimizer.state_sizes, strict=True)
        return tuple(torch.cat(tensors) if size is None else tensors[0] for tensors, size in columns)
