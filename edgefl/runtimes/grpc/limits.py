"""The bounds of a transport: sizes, memory, and the few times it waits for."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
SMALL_BYTES = 64 * 1024
"""Messages up to this size go before larger ones."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one process. All sizes in bytes, all times in seconds."""

    max_message_bytes: int = 2048 * MIB
    """Largest payload that is taken."""
    memory_budget_bytes: int = 4096 * MIB
    """Payloads that are being received, all together; a message over it waits until others are complete."""
    max_note_bytes: int = 16 * MIB
    """Largest note between processes."""
    max_open_messages: int = 4096
    """Messages that one process may have begun and not finished."""
    kept_bytes: int = 1024 * MIB
    """Payload that the others keep for a process with a state folder, until it saves."""
    frame_bytes: int = MIB
    """Most of a payload in one frame."""
    frame_s: float = 0.02
    """Most time that one frame may take the link."""
    grace_s: float = 30.0
    """A process that stays away this long is gone."""
    connect_timeout_s: float = 180.0
    """All processes must have connected by then."""
    hello_timeout_s: float = 10.0
    """A stream that has not said who it is by then is refused."""
    idle_s: float = 60.0
    """A connection without a stream is closed after this."""
    max_streams: int = 64
    """Streams of one connection at once; the other processes have one each, and a probe."""
    keepalive_s: float = 10.0
    """A silent connection is probed this often, and dropped when a probe stays unanswered as long."""
    flush_s: float = 10.0
    """Closing waits this long for what is still under way."""
    waiting_log_s: float = 5.0
    """While it waits for processes to connect, it says for whom: first after this, then ever more rarely."""
