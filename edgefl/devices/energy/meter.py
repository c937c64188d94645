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
class CounterMeter:
    """A counter of joules that starts again at zero when it is full.

    read: the counter in joules now, or raises Unavailable. full_j: where it wraps; None: never. It has to be
    sampled before it can wrap twice: a minute is safe for every processor known.
    """

    name: str
    covers: str
    read: Callable[[], float]
    full_j: float | None = None
    reason: str | None = None
    _last: float | None = None
    _total: float = 0.0

    @property
    def joules(self) -> float | None:
        return self._total if self._last is not None and self.reason is None else None

    def sample(self, time_s: float) -> None:
        try:
            now = self.read()
        except Unavailable as error:
            self.reason = str(error)
            return
        if self._last is not None:
            step = now - self._last
            if step < 0:
                if self.full_j is None:
                    self.reason = f"{self.name}: the counter went back and does not say where it wraps"
                    return
                step += self.full_j
            self._total += step
        self._last = now


@dataclass
class PowerMeter:
    """A source of watts; joules are their integral, straight between samples.

    read: watts now, or raises Unavailable.
    """

    name: str
    covers: str
    read: Callable[[], float]
    reason: str | None = None
    _last: tuple[float, float] | None = None
    _total: float = 0.0

    @property
    def joules(self) -> float | None:
        return self._total if self._last is not None and self.reason is None else None

    def sample(self, time_s: float) -> None:
        try:
            watts = self.read()
        except Unavailable as error:
            self.reason = str(error)
            return
        if self._last is not None:
            before_s, before = self._last
            self._total += (time_s - before_s) * (watts + before) / 2
        self._last = time_s, watts


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
