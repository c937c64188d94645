"""Where figures of a catalog come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict


class Source(BaseModel):
    """What is said of some figures of an entry, and where that can be read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    figures: tuple[str, ...]
    """Keys of the entry, such as "busy_w"."""
    says: str
    """What is read there, or how the figure was estimated."""
    url: str | None = None
    """A public document; None for an estimate or an assumption of our own."""
    verified: bool = False
    """Whether what it says was read there, or in a copy, when the entry was written."""


def with_common(entry: Mapping[str, Any], common: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An entry's table with the sources that a catalog gives once for all entries.

    common: tables of `Source`; of each, the figures that the entry has and names no source of its own for.
    """
    own = list(entry.get("sources", ()))
    named = {figure for source in own for figure in source["figures"]}
    for source in common:
        figures = [figure for figure in source["figures"] if figure in entry and figure not in named]
        own += [{**source, "figures": figures}] if figures else []
    return {**entry, "sources": own}
