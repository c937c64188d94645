"""Where the wall time of a virtual run goes: a profile of the testbed itself.

A stopwatch that always runs for exactly one kind of time. It is started anew at the methods where one kind
begins and another ends, so that the kinds add up to the run. It costs each of these calls about a third of a
microsecond, and nothing when it is not asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from edgefl.errors import ConfigError
from edgefl.experiment.observer import RunObserver
from edgefl.runtimes.virtual import VirtualRuntime

FILE = "profile.json"
KINDS = ("training", "programs", "messages", "recording", "evaluation", "events")
"""training: carrying work out, or waiting for it; programs: the method's own code; messages: sending, links,
delivery; recording: spans, metrics, events; evaluation: of published models; events: all else, the clock."""
_OF_RUNTIME = {
    "messages": ("send", "_arrival"),
    "programs": ("_resume",),
    "training": ("_result_of",),
}
_OF_LINKS = {"messages": ("_on_left",)}
_OF_WORKSHOP = {"training": ("_carry_out_all",)}
_OF_OBSERVER = {"recording": ("published", "recorded", "span", "event"), "evaluation": ("_evaluate",)}


class Stopwatch:
    """Wall seconds by kind; a kind that begins within another takes its time away from that one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.calls = dict.fromkeys(KINDS, 0)
        self._kind, self._since = "events", time.perf_counter()

    def switch(self, kind: str) -> str:
        """Count time for this kind from now on; returns the one it was counted for."""
        now = time.perf_counter()
        before = self._kind
        self.seconds[before] += now - self._since
        self._kind, self._since = kind, now
        return before

    def around(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with its time counted for a kind."""

        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.calls[kind] += 1
            before = self.switch(kind)
            try:
                return call(*args, **kwargs)
            finally:
                self.switch(before)

        return timed


class RunProfile:
    """Watches where a run's wall time goes. Raises ConfigError for a run that keeps checkpoints: what is
    watched cannot be stored."""

    def __init__(self, runtime: VirtualRuntime, observer: RunObserver) -> None:
        if runtime.logging:
            raise ConfigError("--profile-run", True, "without execution.checkpoint_s")
        self._watch = Stopwatch()
        self._runtime = runtime
        owners = (
            (runtime, _OF_RUNTIME),
            (runtime._links, _OF_LINKS),
            (runtime._workshop, _OF_WORKSHOP),
            (observer, _OF_OBSERVER),
        )
        for owner, table in owners:
            for kind, names in table.items():
                for name in names:
                    setattr(owner, name, self._watch.around(kind, getattr(owner, name)))

    def result(self) -> dict[str, Any]:
        """wall_s; seconds, share and calls by kind; events and messages of the run, and their rates."""
        self._watch.switch("events")
        seconds = self._watch.seconds
        total = sum(seconds.values())
        testbed_s = total - seconds["training"] - seconds["evaluation"]
        return {
            "wall_s": total,
            "seconds": seconds,
            "share": {kind: value / total for kind, value in seconds.items()},
            "calls": self._watch.calls,
            "testbed_share": testbed_s / total,
            "num_events": self._runtime.num_events,
            "num_messages": self._runtime.traffic.messages,
        }


def in_words(profile: Mapping[str, Any]) -> str:
    """One line: the shares of the kinds, the largest first."""
    shares: Mapping[str, float] = profile["share"]
    parts = [f"{kind} {share:.0%}" for kind, share in sorted(shares.items(), key=lambda item: -item[1])]
    return f"wall time {profile['wall_s']:.2f} s: {', '.join(parts)}"
