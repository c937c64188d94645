"""What a table of the experiment file takes, from its class: keys, values, defaults, what is said of them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

NEEDED = "needed"
PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path", Any: "value"}
BOUNDS = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {}", "min_length": "(at least {} long)"}


@dataclass(frozen=True)
class Setting:
    """takes: its values in words. default: as the file would have it; empty where it is nothing, NEEDED where
    there is none. what: what it does."""

    key: str
    takes: str
    default: str
    what: str


def settings(kind: type[BaseModel]) -> list[Setting]:
    """A table's keys in order."""
    said = _field_docs(kind)
    return [
        Setting(key, _kind_of(f.annotation) + _bounds(f.metadata), _default(f), said.get(key, ""))
        for key, f in kind.model_fields.items()
    ]


def is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _field_docs(kind: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field of a class and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base in (BaseModel, object) or not issubclass(base, BaseModel):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                said = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                found[field.target.id] = " ".join(str(text.value.value).split()) if said else ""  # type: ignore[attr-defined]
    return found


def _kind_of(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind_of(inner[0]) + _bounds(m for one in inner[1:] for m in getattr(one, "metadata", [one]))
    if origin in (Union, UnionType):
        return " or ".join(_kind_of(one) for one in inner if one is not NoneType)
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in inner)
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return f"array of: {_kind_of(inner[0])}"
        return "array of " + " and ".join(_kind_of(one) for one in inner)
    if origin is dict:
        return f"table of: {_kind_of(inner[1])}"
    return "table, below" if is_table(annotation) else PLAIN[annotation]


def _bounds(metadata: Any) -> str:
    """Bounds such as "> 0", in the order in which they are written."""
    found = [
        BOUNDS[name].format(getattr(one, name))
        for one in metadata
        for name in BOUNDS
        if getattr(one, name, None) is not None
    ]
    return " " + ", ".join(found) if found else ""


def _default(field: FieldInfo) -> str:
    """The default as the file would have it."""
    value = field.default
    if value is PydanticUndefined and field.default_factory is None:
        return NEEDED
    if value in (PydanticUndefined, None, (), {}) or isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)
