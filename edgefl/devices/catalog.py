"""Device profiles by name, and from a user's own file."""

from __future__ import annotations

import json
import tomllib
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from edgefl.devices.profile import DeviceProfile
from edgefl.errors import ConfigError, first_problem, nearest
from edgefl.sources import with_common

KEY = "fleet.devices"
ALIASES = {
    "raspberry-pi-3": "raspberry-pi-3b-plus",
    "raspberry-pi-4": "raspberry-pi-4b",
    "raspberry-pi-zero-2": "raspberry-pi-zero-2w",
    "pi-zero-2w": "raspberry-pi-zero-2w",
    "pi-3b-plus": "raspberry-pi-3b-plus",
    "pi-4b": "raspberry-pi-4b",
    "pi-4": "raspberry-pi-4b",
    "pi-5": "raspberry-pi-5",
    "xavier-nx": "jetson-xavier-nx",
    "orin-nano": "jetson-orin-nano",
    "agx-orin": "jetson-agx-orin",
    "nuc": "intel-nuc",
    "phone": "phone-arm",
    "workstation": "workstation-gpu",
}


@lru_cache(maxsize=1)
def _profiles() -> dict[str, DeviceProfile]:
    text = files("edgefl.devices").joinpath("catalog.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    common = tables.pop("common")["sources"]
    return {name: DeviceProfile(name=name, **with_common(table, common)) for name, table in tables.items()}


def catalog() -> dict[str, DeviceProfile]:
    """The devices that come with edgefl, by name."""
    return dict(_profiles())


def device(name_or_file: str | Path, key: str = KEY) -> DeviceProfile:
    """A profile by catalog name or alias, or from the path of a .toml or .json file.

    A file holds DeviceProfile's keys at its top; its name is the file's stem unless it gives one.
    Raises ConfigError, in one line that starts with `key`, for an unknown name or a wrong figure.

    >>> device("raspberry-pi-4").title
    'Raspberry Pi 4 Model B (4 GB)'
    """
    path = Path(name_or_file)
    if path.suffix in (".toml", ".json"):
        return _from_file(path, key)
    name = ALIASES.get(str(name_or_file), str(name_or_file))
    if name not in _profiles():
        raise ConfigError(key, name, f"{nearest(name, _profiles())}, or a .toml or .json profile")
    return _profiles()[name]


def _from_file(path: Path, key: str) -> DeviceProfile:
    try:
        text = path.read_text(encoding="utf-8")
        table: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:  # both parsers' errors and a wrong encoding are ValueErrors
        raise ConfigError(key, str(path), f"a readable profile ({error})") from error
    if not isinstance(table, dict):
        raise ConfigError(key, str(path), "a table of a profile's keys")
    unknown = sorted(set(table) - set(DeviceProfile.model_fields))
    if unknown:
        known = nearest(unknown[0], DeviceProfile.model_fields)
        raise ConfigError(f"{key} ({path}).{unknown[0]}", table[unknown[0]], known)
    try:
        return DeviceProfile.model_validate({"name": path.stem, **table})
    except ValidationError as error:
        found = first_problem(error, f"{key} ({path})")
        if isinstance(found.found, dict):  # a whole table says no more than its name
            found = ConfigError(found.key, "the table", found.accepted)
        raise found from error
