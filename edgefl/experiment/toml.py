"""Reading and writing TOML, and one-line errors for what a file holds."""

from __future__ import annotations

import json
import math
import os
import re
import select
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from edgefl.errors import ConfigError, nearest

T = TypeVar("T", bound=BaseModel)
MOST_BYTES = 16_000_000
"""A file of settings that is larger is none."""
MOST_LEVELS = 50
"""Tables in tables in tables: a tenth of it is in use."""
TOO_DEEP = f"tables and arrays within each other at most {MOST_LEVELS} deep"
_MOMENT_S = 2.0
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises ConfigError for a missing one, and for bad TOML, with the line."""
    try:
        table = tomllib.loads(_text(path))
    except ConfigError:
        raise
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("FILE", str(path), f"it is not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("FILE", str(path), f"it is not text in UTF-8: {error.reason}") from error
    except OSError as error:
        raise ConfigError("FILE", str(path), f"a readable file is needed ({error.strerror})") from error
    except RecursionError as error:
        raise ConfigError("FILE", str(path), TOO_DEEP) from error
    except ValueError as error:  # a path that no file can have, an integer of thousands of digits
        raise ConfigError("FILE", str(path), f"it cannot be read: {error}") from error
    refuse_deep(table, "FILE", str(path))
    return table


def refuse_deep(value: object, key: str, found: str) -> None:
    """Refuse tables and arrays that are nested deeper than what goes through them can follow."""
    level = 0
    inner: list[Any] = [value]  # level by level: to go down by recursion is what it guards against
    while inner:
        level += 1
        if level > MOST_LEVELS:
            raise ConfigError(key, found, TOO_DEEP)
        tables = [one.values() if isinstance(one, Mapping) else one for one in inner]
        inner = [one for values in tables for one in values if isinstance(one, Mapping | list | tuple)]


def _text(path: Path) -> str:
    """What is in a file, once it is known to be no endless one."""
    with _opened_pipe(path) if path.is_fifo() else path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ConfigError("FILE", str(path), f"a file of at most {MOST_BYTES / 1e6:g} MB")
    return content.decode("utf-8-sig").replace("\r\n", "\n")


def _opened_pipe(path: Path) -> IO[bytes]:
    """A named pipe to read, if somebody writes into it soon; the plain way waits without end."""
    pipe = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not select.select([pipe], [], [], _MOMENT_S)[0]:
        pipe.close()
        raise ConfigError("FILE", str(path), "a file; this is a pipe into which nobody writes")
    os.set_blocking(pipe.fileno(), True)
    return pipe


def write_toml(table: Mapping[str, Any]) -> str:
    """TOML text of nested tables, in their own order; None and empty tables are left out.

    >>> print(write_toml({"seed": 1, "stop": {"rounds": 3, "target": {"value": 0.9}}}), end="")
    seed = 1
    <BLANKLINE>
    [stop]
    rounds = 3
    target = { value = 0.9 }
    """
    lines = [
        f"{_key(k)} = {literal(v)}" for k, v in table.items() if not isinstance(v, Mapping) and v is not None
    ]
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            body = [f"{_key(k)} = {literal(v)}" for k, v in inner.items() if v is not None and v != {}]
            if body:
                lines += ["", f"[{_key(name)}]", *body]
    return "\n".join(lines) + "\n"


def literal(value: Any) -> str:
    """One value as TOML: a string, number, truth value, array, or inline table.

    Raises TypeError for a value that is none of these.
    """
    if hasattr(value, "item") and not isinstance(value, Mapping):  # numpy's and torch's numbers
        value = value.item()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return _inline({k: v for k, v in value.items() if v is not None})
    return "[" + ", ".join(literal(v) for v in value) + "]"


def _inline(table: Mapping[str, Any]) -> str:
    body = ", ".join(f"{_key(k)} = {literal(v)}" for k, v in table.items())
    return f"{{ {body} }}" if body else "{}"


def _key(key: object) -> str:
    text = str(key)
    return text if _BARE_KEY.fullmatch(text) else literal(text)


def checked(kind: type[T], table: object, key: str) -> T:
    """`table` as a `kind`, with the types that TOML has and no others: no "3" for 3, no true for 1.

    Raises ConfigError, in one line, for the first thing wrong; its key starts with `key`.
    """
    _refuse_numbers(table, key)
    _refuse_keys(table, key)
    try:
        # In JSON mode, strict types still let an array be a tuple, and a string a path.
        return kind.model_validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        raise problem(kind, error, key) from error


def _refuse_numbers(value: object, key: str) -> None:
    """Refuse what no setting can be: infinities, what is no number, integers beyond TOML's 64 bits."""
    if isinstance(value, Mapping):
        for word, inner in value.items():
            _refuse_numbers(inner, f"{key}.{word}" if key else str(word))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            _refuse_numbers(inner, f"{key}.{place}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(key, value, "should be a finite number")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(key, f"an integer of {value.bit_length()} bits", "an integer that fits in 64 bits")


def _refuse_keys(value: object, key: str) -> None:
    """Refuse what is no key of a file: a dictionary made in Python may have any."""
    if isinstance(value, Mapping):
        for word, inner in value.items():
            if not isinstance(word, str):
                raise ConfigError(key or "experiment", word, "keys that are text")
            _refuse_keys(inner, f"{key}.{word}" if key else word)
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_keys(inner, key)


def problem(kind: type[BaseModel], error: ValidationError, key: str) -> ConfigError:
    """The first thing that pydantic found wrong with a table of this kind, in one line."""
    first = error.errors(include_url=False)[0]
    place = tuple(first["loc"])
    where = ".".join(str(part) for part in (key, *place) if part != "")
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):
        return inner
    if first["type"] == "extra_forbidden":
        known = _keys_at(kind, place[:-1])
        return ConfigError(where, first["input"], f"no such key; {nearest(str(place[-1]), known)}")
    if first["type"] == "missing":
        return ConfigError(where, None, "this key is needed")
    if inner is not None:
        return ConfigError(where, first["input"], str(inner))
    return ConfigError(where, first["input"], _words(first["msg"]))


def _words(message: str) -> str:
    return message.replace("Input should", "should").replace("an object", "a table")


def _keys_at(kind: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The keys of the table at a place inside a table of this kind."""
    for part in place:
        if isinstance(part, str) and part in kind.model_fields:
            kind = _table_in(kind.model_fields[part].annotation) or kind
    return list(kind.model_fields)


def _table_in(annotation: Any) -> type[BaseModel] | None:
    """The table class in an annotation such as `tuple[Crash, ...]` or `Target | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_table_in(inner) for inner in get_args(annotation))
    return next((kind for kind in found if kind is not None), None)
