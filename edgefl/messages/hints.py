"""The field types of message classes: what an annotation admits, and which fields a class has."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

import torch

from edgefl.messages.base import Message
from edgefl.messages.wire import RawRef, TensorRef, VectorRef, WireValue
from edgefl.parameters import Vector

_PLAIN = (int, float, bool, str, bytes, type(None), Vector, torch.Tensor)
_ALLOWED = "Vector, Tensor, int, float, bool, str, bytes, None, and tuples and unions of them"
_STANDS_FOR: dict[type, type] = {TensorRef: torch.Tensor, RawRef: bytes, VectorRef: Vector}


@dataclass(frozen=True)
class Hint:
    """What one annotation admits: plain types, and tuples (of fixed items, or of any number of one)."""

    text: str
    types: frozenset[type]
    fixed: tuple[tuple[Hint, ...], ...] = ()
    repeated: tuple[Hint, ...] = ()

    def admits(self, value: WireValue) -> bool:
        """Whether a value, as it stands in a header, is of this type: an int is no float and no bool."""
        if not isinstance(value, tuple):
            return _STANDS_FOR.get(type(value), type(value)) in self.types
        if any(all(item.admits(v) for v in value) for item in self.repeated):
            return True
        return any(
            len(items) == len(value) and all(item.admits(v) for item, v in zip(items, value, strict=True))
            for items in self.fixed
        )

    def fit(self, value: WireValue) -> WireValue:
        """The value as this type would hold it: an int as a float, or a bool as an int, where needed."""
        if isinstance(value, tuple):
            return self._fit_items(value)
        kind = type(value)
        if kind is bool and bool not in self.types:
            kind, value = int, int(typing.cast(int, value))
        if kind is int and int not in self.types and float in self.types:
            return float(typing.cast(int, value))
        return value

    def _fit_items(self, value: tuple[Any, ...]) -> WireValue:
        forms = [tuple(item.fit(v) for v in value) for item in self.repeated]
        forms += [
            tuple(item.fit(v) for item, v in zip(items, value, strict=True))
            for items in self.fixed
            if len(items) == len(value)
        ]
        return next((form for form in forms if self.admits(form)), value)


_HINTS: dict[type[Message], dict[str, Hint]] = {}


def hints(kind: type[Message]) -> dict[str, Hint]:
    """The hint of every field of a message class, in order.

    Raises TypeError, naming class and field, for an annotation that cannot travel.
    """
    found = _HINTS.get(kind)
    if found is not None:
        return found
    try:
        annotations = typing.get_type_hints(kind)
    except NameError as error:
        raise TypeError(f"{kind.__name__}: {error}; its annotations must be names of its module") from error
    found = {f.name: _hint(annotations[f.name], kind, f.name) for f in dataclasses.fields(kind)}
    return _HINTS.setdefault(kind, found)


def _hint(annotation: Any, kind: type[Message], field: str) -> Hint:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    text = getattr(annotation, "__name__", str(annotation)) if origin is None else str(annotation)
    if annotation in _PLAIN:
        return Hint("None" if annotation is type(None) else text, frozenset((annotation,)))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return Hint(text, frozenset(), repeated=(_hint(arguments[0], kind, field),))
    if origin is tuple:
        return Hint(text, frozenset(), fixed=(tuple(_hint(a, kind, field) for a in arguments),))
    if origin in (typing.Union, types.UnionType):
        parts = [_hint(a, kind, field) for a in arguments]
        return Hint(
            text,
            frozenset().union(*(p.types for p in parts)),
            tuple(items for p in parts for items in p.fixed),
            tuple(item for p in parts for item in p.repeated),
        )
    raise TypeError(f"{kind.__name__}.{field}: {text} cannot travel; a field holds {_ALLOWED}")
