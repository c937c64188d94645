"""What can go wrong, as a tree.

EdgeflError
├── ConfigError        bad input: names the key, the value, and what would be accepted (exit code 2)
├── RunError           a run could not finish (exit code 1)
│   ├── Stuck          nobody can ever move again; says which node waits for what
│   └── ProgramFailed  a node program raised; says node, role, time and operation
├── Unreachable        a message can never be acknowledged: its receiver is gone
├── PeerGone           a pattern lost a member that it cannot do without
└── ProtocolError      what came over the network is not what was agreed

`Cancelled` is no error: it ends a task from outside, and passes through every `except Exception`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class EdgeflError(Exception):
    """Root of all errors that edgefl raises on purpose."""


class ConfigError(EdgeflError, ValueError):
    """A setting is wrong. One line: the key, the value found, and what would be right."""

    def __init__(self, key: str, found: object, accepted: str) -> None:
        self.key, self.found, self.accepted = key, found, accepted
        super().__init__(f"{shortened(key)} = {shortened(repr(found))}: {shortened(accepted, 2000)}")


class RunError(EdgeflError):
    """A run ended without finishing."""


class Stuck(RunError):
    """No event is left and the programs that end the run still wait.

    waits: what each waiting node waits for, by node name.
    """

    def __init__(self, time_s: float, waits: Mapping[str, str]) -> None:
        self.time_s, self.waits = time_s, dict(waits)
        shown = [f"{name} waits for {what}" for name, what in list(self.waits.items())[:12]]
        rest = len(self.waits) - len(shown)
        tail = f"; and {rest} more" if rest > 0 else ""
        super().__init__(f"at {time_s:.3f} s nobody can move any more: {'; '.join(shown)}{tail}")


class ProgramFailed(RunError):
    """A node program raised. The original error is the cause (`__cause__`)."""

    def __init__(self, node: str, time_s: float, operation: str, error: BaseException) -> None:
        self.node, self.time_s, self.operation = node, time_s, operation
        super().__init__(f"{node} failed at {time_s:.3f} s in {operation}: {type(error).__name__}: {error}")


class Unreachable(EdgeflError):
    """A message was not delivered and never will be."""


class PeerGone(EdgeflError):
    """A member of a group operation is gone."""

    def __init__(self, node: int) -> None:
        self.node = node
        super().__init__(f"node {node} is gone")


class ProtocolError(EdgeflError):
    """A peer sent what the protocol does not allow. `code` names the gRPC status that refuses it."""

    def __init__(self, message: str, code: str = "INVALID_ARGUMENT") -> None:
        self.code = code
        super().__init__(message)


class Cancelled(BaseException):
    """Thrown into a task that is ended from outside; clean up in `finally`, await nothing."""


def shortened(text: str, most: int = 300) -> str:
    """A text of at most `most` characters, without its middle where it is longer, so that a line stays one.

    >>> shortened("abcdefghij", 7)
    'ab...ij'
    """
    kept = (most - 3) // 2
    return text if len(text) <= most else f"{text[:kept]}...{text[-kept:]}"


def nearest(word: str, known: Iterable[str]) -> str:
    """What to say of an unknown word: the nearest known one and the whole list.

    >>> nearest("fedavgg", ["fedavg", "d-psgd"])
    "did you mean 'fedavg'? known: d-psgd, fedavg"
    """
    names = sorted(known)
    close = difflib.get_close_matches(str(word)[:100], names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names)}"


def first_problem(error: ValidationError, key: str) -> ConfigError:
    """The first thing that pydantic found wrong with a table called `key`, as one line."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in (key, *problem["loc"]) if part != "")
    found = None if problem["type"] == "missing" else problem["input"]
    if problem["type"] in ("value_error", "assertion_error"):
        return ConfigError(where, found, str(problem["ctx"]["error"]))
    return ConfigError(where, found, problem["msg"].replace("Input should", "should"))
