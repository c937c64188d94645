"""Access links by name, and as people write them down."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from pydantic import ValidationError

from edgefl.errors import ConfigError, first_problem, nearest
from edgefl.network.link import Access
from edgefl.sources import with_common

BYTES_PER_S = {
    "bit/s": 1 / 8,
    "kbit/s": 1e3 / 8,
    "Mbit/s": 1e6 / 8,
    "Gbit/s": 1e9 / 8,
    "B/s": 1.0,
    "kB/s": 1e3,
    "MB/s": 1e6,
    "GB/s": 1e9,
}
HERTZ = {"Hz": 1.0, "kHz": 1e3, "MHz": 1e6, "GHz": 1e9}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]+)\s*")


@lru_cache(maxsize=1)
def _catalog() -> dict[str, Access]:
    tables = tomllib.loads(files("edgefl.network").joinpath("links.toml").read_text(encoding="utf-8"))
    common = tables.pop("common")["sources"]
    return {name: Access(name=name, **with_common(table, common)) for name, table in tables.items()}


def links() -> dict[str, Access]:
    """The link classes that come with edgefl, by name: ethernet, fibre, wifi-5, lte, ..."""
    return dict(_catalog())


def link(name: str, key: str = "network.link") -> Access:
    """One link class by name. Raises ConfigError, in a line that starts with `key`, for an unknown one."""
    if name not in _catalog():
        raise ConfigError(key, name, nearest(name, _catalog()))
    return _catalog()[name]


def parse_link(table: Mapping[str, Any] | str, key: str = "network.link") -> Access:
    """A link as a user writes it: the name of a class, or a table.

    table: up and down ("2 Mbit/s"), latency ("20 ms"), jitter, loss, segment, name; or Access's own keys
    with numbers in bytes per second and seconds; `like` names a class that fills in what is missing, and so
    do bandwidth ("5 MHz", the node's own share) and snr_db: the rate of a wireless channel, both ways.
    Raises ConfigError, whose key starts with `key`.

    >>> parse_link({"up": "2 Mbit/s", "down": "10 Mbit/s", "latency": "20 ms"}).up_bytes_per_s
    250000.0
    """
    if isinstance(table, str):
        return link(table)
    if not isinstance(table, Mapping):
        raise ConfigError(key, table, 'the name of a link class, or a table such as {up = "2 Mbit/s"}')
    given = dict(table)
    figures: dict[str, Any] = {}
    if "like" in given:
        figures = link(str(given.pop("like"))).model_dump(exclude={"source", "sources"})
    if "bandwidth" in given or "snr_db" in given:
        hertz = _quantity(text := given.pop("bandwidth", None), HERTZ, f"{key}.bandwidth")
        if not hertz:
            raise ConfigError(f"{key}.bandwidth", text, "more than 0 Hz")
        figures["up_bytes_per_s"] = figures["down_bytes_per_s"] = channel_bytes_per_s(
            hertz, _decibels(given.pop("snr_db", None), f"{key}.snr_db")
        )
    for short, full, units in _SHORT:
        if short in given:
            if full in given:
                raise ConfigError(f"{key}.{full}", given[full], f"leave it out, {short} says the same")
            given[full] = _quantity(given.pop(short), units, f"{key}.{short}")
    unknown = [word for word in given if word not in Access.model_fields]
    if unknown:
        words = [short for short, _, _ in _SHORT]
        words += ["bandwidth", "snr_db", "jitter", "loss", "segment", "name", "like"]
        raise ConfigError(f"{key}.{unknown[0]}", given[unknown[0]], nearest(unknown[0], words))
    figures.update(given)
    for short, full, _ in _SHORT[:2]:
        if full not in figures:
            raise ConfigError(f"{key}.{short}", None, 'a rate such as "10 Mbit/s"')
    try:
        return Access.model_validate(figures)
    except ValidationError as error:
        raise first_problem(error, key) from error


def parse_rate(text: str, key: str = "rate") -> float:
    """Bytes per second from text such as "10 Mbit/s" or "1.5 MB/s" (k, M, G are powers of 1000)."""
    return _quantity(text, BYTES_PER_S, key)


def parse_time(text: str, key: str = "time") -> float:
    """Seconds from text such as "20 ms"."""
    return _quantity(text, SECONDS, key)


def channel_bytes_per_s(bandwidth_hz: float, snr_db: float) -> float:
    """What a wireless channel carries at best: bandwidth x log2(1 + signal-to-noise ratio) bits per second.

    Source: Shannon 1948, A Mathematical Theory of Communication.

    >>> channel_bytes_per_s(8e6, 10.0) == 1e6 * math.log2(11)
    True
    """
    return bandwidth_hz * math.log2(1 + 10 ** (snr_db / 10)) / 8


def _decibels(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -30 <= value <= 90:
        raise ConfigError(key, value, "a number of decibels from -30 to 90, beside a bandwidth")
    return float(value)


def _quantity(text: object, units: Mapping[str, float], key: str) -> float:
    found = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if found is None or found[2] not in units:
        raise ConfigError(key, text, f"a number and a unit, one of {', '.join(units)}")
    return float(found[1]) * units[found[2]]


_SHORT = (
    ("up", "up_bytes_per_s", BYTES_PER_S),
    ("down", "down_bytes_per_s", BYTES_PER_S),
    ("latency", "latency_s", SECONDS),
)
