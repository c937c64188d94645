"""Who carries work items out, and which of them together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, Protocol

from edgefl.errors import ConfigError, nearest
from edgefl.learning.dense import DenseGroups, dense_layers
from edgefl.learning.learner import Learner
from edgefl.learning.work import Evaluate, Gradient, LocalSGD, Work

ExecutorName = Literal["auto", "inline", "batched"]
DEFAULT_GROUP = 64


class Executor(Protocol):
    """Carries out work items; which ones together follows from their keys, never from measured time."""

    def run(self, works: Sequence[Work]) -> list[object]:
        """The result of each item, or the Exception that it raised, in the order given."""
        ...

    def group_key(self, work: Work) -> Hashable | None:
        """Items of equal keys gain from being given together; None: nothing is gained."""
        ...

    def describe(self) -> dict[str, Any]:
        """The decision, for the resolved experiment file."""
        ...


class Inline:
    """One item after the other."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def run(self, works: Sequence[Work]) -> list[object]:
        return [_attempt(work, self.learner) for work in works]

    def group_key(self, work: Work) -> Hashable | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"executor": "inline"}


class Batched:
    """Items of one key become one vectorised step, at most `group` at once; the rest one by one.

    For models of dense layers alone. Raises ConfigError for others, or a group below 1.
    """

    def __init__(self, learner: Learner, group: int = DEFAULT_GROUP) -> None:
        layers = dense_layers(learner.model)
        if layers is None:
            accepted = f"{learner.model.name} is no stack of dense layers; take 'auto' or 'inline'"
            raise ConfigError("executor", "batched", accepted)
        if group < 1:
            raise ConfigError("group", group, "at least 1 is needed")
        self.learner, self.group = learner, group
        self._dense = DenseGroups(learner, layers)

    def run(self, works: Sequence[Work]) -> list[object]:
        results: list[object] = [None] * len(works)
        groups: dict[Hashable, list[int]] = {}
        for i, work in enumerate(works):
            key = self.group_key(work)
            groups.setdefault(("alone", i) if key is None else key, []).append(i)
        for members in groups.values():
            for start in range(0, len(members), self.group):
                chosen = members[start : start + self.group]
                for i, result in zip(chosen, self._together([works[i] for i in chosen]), strict=True):
                    results[i] = result
        return results

    def _together(self, works: Sequence[Work]) -> Sequence[object]:
        if len(works) > 1:
            try:
                return self._vectorised(works)
            except Exception:
                # One item's mistake must not fail the others: each shows its own below.
                pass
        return [_attempt(work, self.learner) for work in works]

    def _vectorised(self, works: Sequence[Work]) -> Sequence[object]:
        if isinstance(works[0], LocalSGD):
            return self._dense.train([w for w in works if isinstance(w, LocalSGD)])
        if isinstance(works[0], Gradient):
            return self._dense.gradients([w for w in works if isinstance(w, Gradient)])
        return self._dense.evaluate([w for w in works if isinstance(w, Evaluate)])

    def group_key(self, work: Work) -> Hashable | None:
        return work.batch_key(self.learner) if type(work) in (LocalSGD, Gradient, Evaluate) else None

    def describe(self) -> dict[str, Any]:
        return {"executor": "batched", "group": self.group}


def make_executor(name: str, learner: Learner, group: int | None = None) -> Executor:
    """The executor of that name; "auto" batches stacks of dense layers and runs other models inline.

    Small dense models are bound by the calls, and gain 10 to 20 times; convolutions by arithmetic, and
    gain nothing. group: most items in one step; DEFAULT_GROUP where None.
    Raises ConfigError for an unknown name, or "batched" for a model that cannot be.
    """
    if name not in ("auto", "inline", "batched"):
        raise ConfigError("executor", name, nearest(name, ("auto", "inline", "batched")))
    if name == "inline" or (name == "auto" and dense_layers(learner.model) is None):
        return Inline(learner)
    return Batched(learner, DEFAULT_GROUP if group is None else group)


def _attempt(work: Work, learner: Learner) -> object:
    try:
        return work.run(learner)
    except Exception as error:
        return error
