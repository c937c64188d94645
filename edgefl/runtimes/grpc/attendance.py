"""Who of a run's processes has connected yet, and why the others have not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from edgefl.errors import ProtocolError, RunError
from edgefl.runtimes.grpc.limits import Limits
from edgefl.runtimes.grpc.peer import Peer

log = logging.getLogger("edgefl.grpc")
_LONGEST_SILENCE_S = 60.0
"""Whom it waits for is said at least this often."""


class Attendance:
    """Waits for the first connection of each of the others."""

    def __init__(self, peers: Iterable[Peer], limits: Limits) -> None:
        self._peers, self._limits = tuple(peers), limits
        self._changed = asyncio.Event()
        self._refusal: ProtocolError | None = None

    def arrived(self) -> None:
        """One of them has connected."""
        self._changed.set()

    def refused(self, peer: Peer, error: ProtocolError) -> None:
        """A connection to one of them has failed: at the first, it may be of a different run."""
        if error.code == "FAILED_PRECONDITION" and peer.life < 0:
            self._refusal = error
            self._changed.set()

    async def complete(self) -> None:
        """Return when all have connected.

        Raises ProtocolError when one of them belongs to a different run, RunError with who is missing after
        `limits.connect_timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.connect_timeout_s
        pause_s = self._limits.waiting_log_s
        say_at = loop.time() + pause_s
        while missing := [peer for peer in self._peers if peer.life < 0]:
            if self._refusal is not None:
                raise self._refusal
            now = loop.time()
            if now >= deadline:
                within_s = self._limits.connect_timeout_s
                raise RunError(f"no connection within {within_s:.3g} s to {_whom(missing)}")
            if now >= say_at:
                log.warning("waiting for %s; for another %.0f s", _whom(missing, most=3), deadline - now)
                pause_s = min(2 * pause_s, _LONGEST_SILENCE_S)
                say_at = now + pause_s
            self._changed.clear()
            try:
                async with asyncio.timeout(min(say_at, deadline) - now):
                    await self._changed.wait()
            except TimeoutError:
                continue


def _whom(missing: list[Peer], most: int | None = None) -> str:
    """Who they are, the first `most` of them by name, with each problem said once for all who have it."""
    by_problem: dict[str, list[str]] = {}
    for peer in missing[:most]:
        by_problem.setdefault(peer.problem or "", []).append(peer.title)
    words = [", ".join(titles) + (f": {why}" if why else "") for why, titles in by_problem.items()]
    rest = len(missing) - len(missing[:most])
    return "; ".join(words + ([f"and {rest} more"] if rest else []))
