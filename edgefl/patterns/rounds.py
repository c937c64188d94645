"""Rounds of a synchronous server: whom to ask, whose reports count, and when a round is over."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.learning.work import Work
from edgefl.nodes import Back, Message, MethodConfig, Node
from edgefl.nodes.plan import RunPlan
from edgefl.patterns.gather import gather
from edgefl.patterns.reports import MOST_NORM, Intake


class RoundConfig(MethodConfig):
    """The rules of a round, for every method that has rounds and a server."""

    client_fraction: float = Field(default=1.0, gt=0, le=1)
    """C: share of the clients in a round's cohort, at least one client."""
    over_selection: float = Field(default=0.0, ge=0, le=1000)
    """o: choose ceil((1 + o) m) clients, close the round at the m-th report and have the rest stop."""
    round_deadline_s: float | None = Field(default=None, gt=0)
    """Seconds from the start of a round to its end, whoever has reported: the rest are told to stop. None:
    wait for all that live."""

    @property
    def closes_early(self) -> bool:
        """Whether a round may be over while some are still at work for it."""
        return self.round_deadline_s is not None or self.over_selection > 0

    min_reports: int = Field(default=1, ge=1)
    """Fewest reports that make a round count."""
    max_update_norm: float = Field(default=MOST_NORM, gt=0)
    """Larger changes of a client are refused."""


M = TypeVar("M", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True)
class Stop(Message):
    """The round is closed: leave its work."""

    newest_by = ("sender",)
    round: int


class Round:
    """One round: its cohort, drawn anew; counted: the senders of the reports that count, as they came;
    excused: those whom `check` found to sit the round out, by their own word.

    Choices: a report of an older round is dropped and counted; one that is refused (see Intake) is not waited
    for again; with fewer than min_reports the round is void. rules: of the round; the method's config, which
    those asked go by too, where None.
    """

    def __init__(
        self, node: Node, t: int, clients: Sequence[int], intake: Intake, rules: RoundConfig | None = None
    ) -> None:
        config: RoundConfig = rules or node.config
        self._tells = rules is None
        self._node, self.t, self._config, self._intake = node, t, config, intake
        self.wanted = max(round(config.client_fraction * len(clients)), 1)
        size = math.ceil((1 + config.over_selection) * self.wanted)
        self.cohort = cohort(node.rng("cohort", t), clients, size)
        self.counted: list[int] = []
        self.excused: list[int] = []
        self._losses: list[float] = []
        self._refused = 0

    async def reports(
        self, kind: type[M] | tuple[type[M], ...], check: Callable[[Any], T | None]
    ) -> AsyncIterator[tuple[M, T]]:
        """Reports that count, with what `check` makes of them (None: it refused or excused), as they come.

        Ends when all of the cohort that live have reported, `wanted` reports count, or time is up: those who
        are still at work are then told to stop, so that the next model finds them free.
        """
        timeout_s = self._config.round_deadline_s
        waiting = set(self.cohort)
        async for r in gather(self._node, kind, self.cohort, round=self.t, timeout_s=timeout_s):
            waiting.discard(r.sender)
            found = check(r)
            if found is None:
                self._refused += r.sender not in self.excused
                continue
            self.counted.append(r.sender)
            self._losses.append(getattr(r, "loss", math.nan))
            yield r, found
            if len(self.counted) == self.wanted:
                break
        if waiting and self._tells and self._config.closes_early:
            self._node.send(waiting, Stop(self.t))

    @property
    def counts(self) -> bool:
        """Whether enough have reported."""
        return len(self.counted) >= self._config.min_reports

    @property
    def absent(self) -> dict[str, int]:
        """How many of the cohort have no report that counts: lost with their node, refused, or late."""
        missing = len(self.cohort) - len(self.counted)
        silent = set(self.cohort).difference(self.counted)
        gone = [k for k in self.cohort if k in silent and not self._node.fleet.alive(k)]
        late = max(0, missing - self._refused - len(gone) - len(self.excused))
        return {"late": late, "lost": len(gone), "refused": self._refused}

    def record(self, **more: float) -> None:
        """Write who reported and who did not, and what the method adds."""
        losses = [loss for loss in self._losses if math.isfinite(loss)]
        self._node.record(
            round=self.t,
            reports=len(self.counted),
            missing=len(self.cohort) - len(self.counted),
            **self.absent,
            train_loss=sum(losses) / len(losses) if losses else math.nan,
            **more,
        )


def refuse_void_rounds(plan: RunPlan) -> None:
    """Refuse more min_reports than clients are wanted in a round: every round would be void."""
    config: RoundConfig = plan.config
    clients = len(plan.ids("client"))
    wanted = max(round(config.client_fraction * clients), 1)
    if config.min_reports > wanted:
        accepted = f"at most {wanted}, the reports that a round of {clients} clients wants"
        raise ConfigError(f"method.{plan.method.name}.min_reports", config.min_reports, accepted)


def unless_stopped(node: Node, work: Work, t: int) -> Awaitable[Any]:
    """What the work comes to; None when the server closes round t first: the rest of it is not done."""
    return _unless_stopped(node, work, t) if node.config.closes_early else node.compute(work)


async def _unless_stopped(node: Node, work: Work, t: int) -> Any:
    computing = node.start(node.compute(work))
    if await node.first(computing, node.receive(Stop, round=t)) is computing:
        return computing.value
    computing.cancel()
    return None


def cohort(rng: np.random.Generator, ids: Sequence[int], size: int) -> list[int]:
    """`size` of `ids` uniformly without replacement, ascending; all of them when size is their number."""
    if size >= len(ids):
        return list(ids)
    return sorted(int(i) for i in rng.choice(np.asarray(ids), size, replace=False))


async def somebody_alive(node: Node, ids: Collection[int]) -> None:
    """Wait for one of `ids` to return while all of them are gone; at once where one lives.

    Without it a server whose clients are all gone would run through its void rounds in no time.
    """
    while not any(node.fleet.alive(j) for j in ids):
        await node.receive(Back, sender=ids)
