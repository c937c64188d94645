"""What the network between nodes offers, before any traffic."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from edgefl.sources import Source


class Access(BaseModel):
    """How one node is connected: rates in bytes per second, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    up_bytes_per_s: float = Field(gt=0)
    down_bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(default=0.0, ge=0)
    """One way, from this node to the backbone; the latency of a pair is the sum of its two ends'."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """Relative spread of the latency: each message draws it from latency x [1 - jitter, 1 + jitter]."""
    loss: float = Field(default=0.0, ge=0, lt=1)
    """Share of packets lost: costs reliable messages time, and lossy ones may vanish."""
    segment: str | None = None
    """A shared segment (an access point) that all its nodes' traffic crosses."""
    name: str = ""
    source: str = ""
    """Where the figures come from, in one line."""
    sources: tuple[Source, ...] = ()
    """Where it can be read, figure by figure."""
