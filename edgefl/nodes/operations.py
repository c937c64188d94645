"""Operations: what a node program may await. Inert data; a runtime is one interpreter of them."""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mypy_extensions import mypyc_attr

from edgefl.messages.base import Message

if TYPE_CHECKING:
    from edgefl.learning.work import Work
    from edgefl.nodes.handles import Task, Transfer

T_co = TypeVar("T_co", covariant=True)


@mypyc_attr(allow_interpreted_subclasses=True)
class Op(Generic[T_co]):
    """One thing to wait for. Awaiting it hands it to the runtime, which answers when it is done."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, T_co]:
        return (yield self)  # type: ignore[no-any-return]

    def describe(self) -> str:
        """What a node that waits here waits for, in words."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class Sleep(Op[None]):
    """Let `seconds` pass on the node's clock."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"a node cannot sleep {seconds} s")
        self.seconds = seconds

    def describe(self) -> str:
        return f"{self.seconds:g} s to pass"


@mypyc_attr(allow_interpreted_subclasses=True)
class Compute(Op[T_co]):
    """Have the processor carry out `work`; `share`: on a reserved share of it, beside the queue."""

    __slots__ = ("share", "work")

    def __init__(self, work: Work, share: float | None) -> None:
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"a share of a processor lies in (0, 1], found {share}")
        self.work, self.share = work, share

    def describe(self) -> str:
        return f"its {type(self.work).__name__}"


@mypyc_attr(allow_interpreted_subclasses=True)
class Receive(Op[Any]):
    """The oldest message of these kinds, from these senders, with these field values."""

    __slots__ = ("fields", "kinds", "senders", "timeout_s")

    def __init__(
        self,
        kinds: tuple[type[Message], ...],
        sender: int | Collection[int] | None,
        timeout_s: float | None,
        fields: dict[str, Any],
    ) -> None:
        if not kinds:
            raise TypeError("receive needs at least one kind of message")
        self.kinds = kinds
        self.senders: Collection[int] | None = (sender,) if isinstance(sender, int) else sender
        self.timeout_s = timeout_s
        self.fields = fields

    def describe(self) -> str:
        kinds = " or ".join(kind.__name__ for kind in self.kinds)
        of = "" if self.senders is None else f" from {_listed(self.senders)}"
        where = "" if not self.fields else f" with {', '.join(f'{k}={v}' for k, v in self.fields.items())}"
        return f"{kinds}{of}{where}"


@mypyc_attr(allow_interpreted_subclasses=True)
class First(Op[Any]):
    """The first ready of receives, tasks and transfers; the others lose nothing."""

    __slots__ = ("ops", "timeout_s")

    def __init__(self, ops: tuple[Any, ...], timeout_s: float | None) -> None:
        self.ops, self.timeout_s = ops, timeout_s

    def describe(self) -> str:
        return "the first of: " + "; ".join(op.describe() for op in self.ops)


@mypyc_attr(allow_interpreted_subclasses=True)
class Join(Op[T_co]):
    """The end of a child task."""

    __slots__ = ("task",)

    def __init__(self, task: Task[T_co]) -> None:
        self.task = task

    def describe(self) -> str:
        return self.task.describe()


@mypyc_attr(allow_interpreted_subclasses=True)
class Left(Op[None]):
    """The uplink is free of a transfer again."""

    __slots__ = ("transfer",)

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer

    def describe(self) -> str:
        return self.transfer.describe()


@mypyc_attr(allow_interpreted_subclasses=True)
class Delivered(Op[None]):
    """All receivers of a transfer have acknowledged it."""

    __slots__ = ("transfer",)

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer

    def describe(self) -> str:
        return f"the acknowledgement of {self.transfer.describe()}"


@mypyc_attr(allow_interpreted_subclasses=True)
class Save(Op[None]):
    """Make `state` this node's saved state, and with it all messages consumed so far.

    stored: be done only when it outlives the process.
    """

    __slots__ = ("state", "stored")

    def __init__(self, state: dict[str, Any], stored: bool = False) -> None:
        self.state, self.stored = state, stored

    def describe(self) -> str:
        return "its state to be saved"


def _listed(ids: Collection[int]) -> str:
    shown = ", ".join(map(str, sorted(ids)[:8]))
    return shown if len(ids) <= 8 else f"{shown} and {len(ids) - 8} more"
