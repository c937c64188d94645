"""Who carries work items out, and which of them together."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol, TypeVar

from edgefl.errors import ConfigError, nearest
from edgefl.learning.dense import DenseGroups, Prepared
from edgefl.learning.learner import Learner
from edgefl.learning.model import Model
from edgefl.learning.stacks import dense_layers
from edgefl.learning.work import Evaluate, Gradient, LocalSGD, Work
from edgefl.learning.workers import Job, Workers, default_workers

T = TypeVar("T")
_WHOLE = (LocalSGD, Gradient, Evaluate)
"""Work on the whole model, which holds nothing from one item to the next."""

ExecutorName = Literal["auto", "inline", "batched", "parallel"]
DEFAULT_GROUP = 32
"""Models of 5,000 to 160,000 parameters all ran close to their best at it (groups of 4 to 100)."""
_LARGEST_GROUP = 50
"""Of 100 items, two groups of 50 took 85 to 90 % of the time that three of 32 and the rest took."""
_MOST_VALUES, _FEW = 1 << 23, 4
"""Parameters in one group of more than a few models: a million each, they ran twice as fast in groups of 4 or
8 as in groups of 32, which no cache holds."""


class Promise(Protocol):
    """A result that may still be worked on."""

    def result(self) -> object:
        """The result, once it is there, or the Exception that the item raised."""
        ...

    def cancel(self) -> bool:
        """Nobody wants it any more; whether that kept it from being worked on."""
        ...


class Executor(Protocol):
    """Carries out work items; which ones together follows from their keys, never from measured time.

    num_workers: threads beside the caller's that work goes on in; 0: the caller does it, at the latest when
    it asks for the result.
    group: items of one key that are worth beginning together, and gain nothing from waiting for more.
    """

    num_workers: int
    group: int

    @property
    def threads(self) -> Workers | None:
        """Those that work goes on in, and the caller's; None where it works alone."""
        ...

    def run(self, works: Sequence[Work]) -> list[object]:
        """The result of each item, or the Exception that it raised, in the order given."""
        ...

    def start(self, works: Sequence[Work]) -> Sequence[Promise]:
        """The same, carried on beside the caller where there are workers."""
        ...

    def group_key(self, work: Work) -> Hashable | None:
        """Items of equal keys gain from being given together; None: nothing is gained."""
        ...

    def describe(self) -> dict[str, Any]:
        """The decision, for the resolved experiment file."""
        ...


class Inline:
    """One item after the other."""

    num_workers = 0
    threads: Workers | None = None
    group = 1

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def run(self, works: Sequence[Work]) -> list[object]:
        return [_attempt(work, self.learner) for work in works]

    def start(self, works: Sequence[Work]) -> Sequence[Promise]:
        return [_done(result) for result in self.run(works)]

    def group_key(self, work: Work) -> Hashable | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"executor": "inline"}


class Parallel:
    """Item beside item, each by itself, on threads: for models that are bound by arithmetic. workers: the
    threads, the caller's among them.

    Every result is Inline's, bit for bit. Work on one stage of a model stays with the caller, where what its
    forward pass keeps for the backward pass lies.
    """

    group = 1

    def __init__(self, learner: Learner, workers: int) -> None:
        self.learner = learner
        self.threads = Workers(workers)
        self.num_workers = self.threads.beside
        self._learners = [learner]
        """Each thread's, with scratch memory of its own; the caller's first."""

    def run(self, works: Sequence[Work]) -> list[object]:
        return [future.result() for future in self.start(works)]

    def start(self, works: Sequence[Work]) -> Sequence[Promise]:
        return [
            self._submit(work) if type(work) in _WHOLE else _done(_attempt(work, self.learner))
            for work in works
        ]

    def _submit(self, work: Work) -> Promise:
        while len(self._learners) <= min(self.threads.started + 1, self.num_workers):
            # Made here, and not in the threads: making modules borrows torch's global random state.
            self._learners.append(self.learner.twin())
        return self.threads.submit(lambda place: _attempt(work, self._learners[place]))

    def group_key(self, work: Work) -> Hashable | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"executor": "parallel"}


class Group:
    """Items that become one vectorised step; one by one where that fails: one item's mistake must not fail
    the others, and each shows its own."""

    def __init__(self, works: Sequence[Work], executor: Batched, workers: Workers | None) -> None:
        """workers: who carry it out; None: the caller, when the results are asked for."""
        self._works, self._learner = works, executor.learner
        self._results: Sequence[object] | None = None
        self._job: Job[Any] | None = None
        self._prepared = executor.prepared(works) if len(works) > 1 else None
        if workers is not None and self._prepared is not None:
            call = self._prepared.call
            self._job = workers.submit(lambda _: call())

    def results(self) -> Sequence[object]:
        """What each item comes to, in their order."""
        if self._results is None:
            self._results = self._together()
            self._works, self._job, self._prepared = (), None, None
        return self._results

    def _together(self) -> Sequence[object]:
        if self._prepared is not None:
            try:
                done = self._prepared.call() if self._job is None else self._job.result()
                return self._prepared.results(done)
            except Exception:
                pass
        return [_attempt(work, self._learner) for work in self._works]


class Part:
    """One item's result among those of its group."""

    __slots__ = ("_group", "_place")

    def __init__(self, group: Group, place: int) -> None:
        self._group, self._place = group, place

    def result(self) -> object:
        return self._group.results()[self._place]

    def cancel(self) -> bool:
        return False


class Batched:
    """Items of one key become one vectorised step, at most `group` at once, fewer of large models; others go
    one by one.

    For models of dense layers alone. workers: threads that take the groups side by side, the caller's among
    them; which items make a group does not depend on their number. Raises ConfigError for other models, or a
    group below 1.
    """

    def __init__(self, learner: Learner, group: int = DEFAULT_GROUP, workers: int = 1) -> None:
        layers = dense_layers(learner.model)
        if layers is None:
            accepted = (
                f"{learner.model.name} is no stack of dense layers; take 'auto', 'parallel' or 'inline'"
            )
            raise ConfigError("executor", "batched", accepted)
        if group < 1:
            raise ConfigError("group", group, "at least 1 is needed")
        self.learner = learner
        self.group = min(group, max(_FEW, _MOST_VALUES // learner.model.layout.size))
        self._dense = DenseGroups(learner, layers)
        self.threads = Workers(workers)
        self.num_workers = self.threads.beside
        self._narrower: dict[Model, DenseGroups] = {}

    def run(self, works: Sequence[Work]) -> list[object]:
        return [promise.result() for promise in self._begin(works, beside=False)]

    def start(self, works: Sequence[Work]) -> Sequence[Promise]:
        return self._begin(works, beside=True)

    def _begin(self, works: Sequence[Work], beside: bool) -> Sequence[Promise]:
        """beside: the caller goes on; else a single group stays with it: no other thread would be faster."""
        groups, promises = self._groups(works), dict[int, Part]()
        workers = self.threads if self.num_workers and (beside or len(groups) > 1) else None
        for members in groups:
            group = Group([works[i] for i in members], self, workers)
            for place, i in enumerate(members):
                promises[i] = Part(group, place)
        return [promises[i] for i in range(len(works))]

    def _groups(self, works: Sequence[Work]) -> list[list[int]]:
        """Which items go together: of one key, in the order given, in groups of about equal size."""
        by_key: dict[Hashable, list[int]] = {}
        for i, work in enumerate(works):
            key = self.group_key(work)
            by_key.setdefault(("alone", i) if key is None else key, []).append(i)
        groups = []
        for members in by_key.values():
            count = -(-len(members) // self.group)
            cuts = [len(members) * k // count for k in range(count + 1)]
            groups += [members[a:b] for a, b in itertools.pairwise(cuts)]
        return groups

    def prepared(self, works: Sequence[Any]) -> Prepared | None:
        """Items of one key as one vectorised step; None where they cannot be."""
        narrower = works[0].model if isinstance(works[0], LocalSGD) else None
        try:
            return self._dense_of(narrower).prepared(works)
        except Exception:
            return None

    def _dense_of(self, model: Model | None) -> DenseGroups:
        """The groups of the run's model, or of a narrower one of the same layers."""
        if model is None or model is self.learner.model:
            return self._dense
        if model not in self._narrower:
            layers = dense_layers(model)
            assert layers is not None
            self._narrower[model] = DenseGroups(self.learner, layers, model, self._dense)
        return self._narrower[model]

    def group_key(self, work: Work) -> Hashable | None:
        return work.batch_key(self.learner) if type(work) in _WHOLE else None

    def describe(self) -> dict[str, Any]:
        return {"executor": "batched", "group": self.group}


def even_group(items: int) -> int:
    """The size of groups for so many items at a time: equal ones, at least two where items are many.

    What is left over after full groups begins only when it is due, in a step of nearly the same price.

    >>> [even_group(items) for items in (10, 40, 64, 100)]
    [32, 20, 32, 50]
    """
    if items <= DEFAULT_GROUP:
        return DEFAULT_GROUP
    return -(-items // max(2, -(-items // _LARGEST_GROUP)))


def make_executor(
    name: str, learner: Learner, group: int | None = None, workers: int | None = None
) -> Executor:
    """The executor of that name; "auto" batches stacks of dense layers and runs other models in parallel.

    Small dense models are bound by the calls, and gain 10 to 20 times from batches; convolutions by
    arithmetic, and gain from a second core alone. group: most items in one step; DEFAULT_GROUP where None.
    workers: threads; as many as there are cores where None. Results do not depend on them.
    Raises ConfigError for an unknown name, or "batched" for a model that cannot be.
    """
    names = ("auto", "inline", "batched", "parallel")
    if name not in names:
        raise ConfigError("executor", name, nearest(name, names))
    if name == "auto":
        name = "parallel" if dense_layers(learner.model) is None else "batched"
    count = default_workers() if workers is None else workers
    if name == "batched":
        return Batched(learner, DEFAULT_GROUP if group is None else group, count)
    if name == "parallel" and count > 1 and learner.device.type == "cpu":
        return Parallel(learner, count)
    return Inline(learner)


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _attempt(work: Work, learner: Learner) -> object:
    try:
        return work.run(learner)
    except Exception as error:
        return error
