"""One interface to whatever measures energy: sample it now and then, ask for the joules since the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Kind = Literal["measured", "modelled"]


class Unavailable(Exception):
    """A source cannot be read; the message says why."""


class Meter(Protocol):
    """name: of the source. covers: "board", "processor" or "accelerator". reason: why joules is None."""

    name: str
    covers: str

    @property
    def joules(self) -> float | None:
        """Measured since the first sample; None where nothing was, or a sample failed."""
        ...

    @property
    def reason(self) -> str | None: ...

    def sample(self, time_s: float) -> None:
        """Look at the source; time_s: of any clock that does not go back, the same at each call."""
        ...


@dataclass
class _Source:
    """One source that is read at each sample. read: its figure now, or raises Unavailable; then there are no
    joules, and the reason is why."""

    name: str
    covers: str
    read: Callable[[], float]
    reason: str | None = field(default=None, kw_only=True)
    _last: tuple[float, float] | None = field(default=None, init=False)
    _total: float = field(default=0.0, init=False)

    @property
    def joules(self) -> float | None:
        return self._total if self._last is not None and self.reason is None else None

    def sample(self, time_s: float) -> None:
        try:
            now = self.read()
            if self._last is not None:
                self._total += self._joules_since(*self._last, time_s, now)
        except Unavailable as error:
            self.reason = str(error)
            return
        self._last = time_s, now

    def _joules_since(self, before_s: float, before: float, now_s: float, now: float) -> float:
        """What two figures one after the other say; raises Unavailable where they make no sense."""
        raise NotImplementedError


@dataclass
class CounterMeter(_Source):
    """A counter of joules that starts again at zero when it is full.

    read: the counter in joules now. full_j: where it wraps; None: never. It has to be sampled before it can
    wrap twice: a minute is safe for every processor known.
    """

    full_j: float | None = None

    def _joules_since(self, before_s: float, before: float, now_s: float, now: float) -> float:
        step = now - before
        if step >= 0:
            return step
        if self.full_j is None:
            raise Unavailable(f"{self.name}: the counter went back and does not say where it wraps")
        return step + self.full_j


@dataclass
class PowerMeter(_Source):
    """A source of watts; joules are their integral, straight between samples. read: watts now."""

    def _joules_since(self, before_s: float, before: float, now_s: float, now: float) -> float:
        return (now_s - before_s) * (now + before) / 2


@dataclass
class SumMeter:
    """Parts of a machine that are measured apart. joules: None as soon as one of them is."""

    parts: Sequence[Meter]
    covers: str = "parts"
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = " + ".join(part.name for part in self.parts)

    @property
    def joules(self) -> float | None:
        known = [part.joules for part in self.parts]
        return None if None in known else sum(j for j in known if j is not None)

    @property
    def reason(self) -> str | None:
        return next((part.reason for part in self.parts if part.reason is not None), None)

    def sample(self, time_s: float) -> None:
        for part in self.parts:
            part.sample(time_s)


@dataclass
class NoMeter:
    """A machine that measures nothing. reasons: by source, why."""

    reasons: dict[str, str]
    name: str = "none"
    covers: str = "nothing"
    joules: None = None

    @property
    def reason(self) -> str:
        return "; ".join(f"{source}: {why}" for source, why in self.reasons.items())

    def sample(self, time_s: float) -> None:
        """Nothing to look at."""
