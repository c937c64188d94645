"""Arithmetic on models that is put off until somebody reads what comes of it.

Who reads first makes it, and what it is made of. A group of models that are trained side by side is made in
the compiled call that trains it, beside the program's own events; then the programs never wait for it. The
operators, and so every bit, are those of making each value at once.

A recipe is immutable and its results are equal whoever makes them, so that threads need no lock: two that
read one value at the same time both make it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from edgefl.parameters.vector import Vector

MEAN, SUM = 0, 1
MOST_VALUES = 1 << 18
"""Larger models are made at once: they would be held longer, at 1 MB each."""
MOST_DEPTH = 8
"""Recipes that build on each other, at most: one more makes those below at once."""


Ingredients = tuple[list[Tensor], list[list[int]], list[list[float]], list[int]]


class Recipe:
    """How values follow from others. MEAN: sum of factors[j] parents[j], in float64; SUM: parents[0] +
    factors[0] parents[1].

    depth: recipes on the longest way to values that are there.
    """

    __slots__ = ("depth", "factors", "kind", "parents")

    def __init__(self, kind: int, parents: Sequence[Vector], factors: list[float]) -> None:
        self.kind, self.parents, self.factors = kind, parents, factors
        self.depth = 1 + max([parent.depth for parent in parents])
        if self.depth > MOST_DEPTH:
            Order(parents).make()
            self.depth = 1


class Order:
    """What it takes to make some vectors, each thing once, for one call of `made`.

    sources: values that are there. recipes: of each step its kind and whence it takes its parents: i stands
    for source i, -1 - k for what step k makes. factors: of each step. wanted: where the vectors' values are,
    likewise.
    """

    def __init__(self, vectors: Iterable[Vector]) -> None:
        self.sources: list[Tensor] = []
        self.recipes: list[list[int]] = []
        self.factors: list[list[float]] = []
        self._steps: list[Vector] = []
        self._places: dict[Vector, int] = {}
        self.wanted = [self._place(vector) for vector in vectors]

    def _place(self, vector: Vector) -> int:
        place = self._places.get(vector)
        if place is None:
            held = vector.held
            if isinstance(held, Recipe):
                self.recipes.append([held.kind, *[self._place(parent) for parent in held.parents]])
                self.factors.append(held.factors)
                self._steps.append(vector)
                place = -len(self._steps)
            else:
                self.sources.append(held)
                place = len(self.sources) - 1
            self._places[vector] = place
        return place

    @property
    def ingredients(self) -> Ingredients:
        """As compiled calls take it."""
        return self.sources, self.recipes, self.factors, self.wanted

    def make(self) -> None:
        """Make them here and now."""
        self.keep(made(self.sources, self.recipes, self.factors))

    def keep(self, found: list[Tensor]) -> None:
        """Take over what `made` returned."""
        for vector, values in zip(self._steps, found, strict=True):
            vector.held = values


def made(sources: list[Tensor], recipes: list[list[int]], factors: list[list[float]]) -> list[Tensor]:
    """Follow recipes one after the other: see Order. Torch compiles this source too."""
    found = [sources[0]]
    for i in range(len(recipes)):
        recipe, by = recipes[i], factors[i]
        first = sources[recipe[1]] if recipe[1] >= 0 else found[-recipe[1]]
        if recipe[0] == 0:
            total = first.to(torch.float64, copy=True).mul_(by[0])
            for j in range(1, len(by)):
                at = recipe[j + 1]
                total.add_(sources[at] if at >= 0 else found[-at], alpha=by[j])
            found.append(total.to(first.dtype))
        else:
            at = recipe[2]
            found.append(torch.add(first, sources[at] if at >= 0 else found[-at], alpha=by[0]))
    return found[1:]


def stacked(
    ingredients: tuple[list[Tensor], list[list[int]], list[list[float]], list[int]],
) -> tuple[list[Tensor], Tensor]:
    """All that had to be made, and the wanted values as rows of a matrix (G, P), which is only to be read."""
    sources, recipes, factors, wanted = ingredients
    found = made(sources, recipes, factors)
    if len(sources) == 1 and len(recipes) == 0:
        return found, sources[0].expand(len(wanted), -1)
    rows = sources[:0]
    for at in wanted:
        rows.append(sources[at] if at >= 0 else found[-1 - at])
    return found, torch.stack(rows)
