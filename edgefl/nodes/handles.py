"""What a program holds of things under way: its child tasks and its transfers."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mypy_extensions import mypyc_attr

from edgefl.errors import EdgeflError
from edgefl.messages.base import Message
from edgefl.nodes.operations import Delivered, Join, Left, Op

if TYPE_CHECKING:
    from edgefl.nodes.port import NodeState

T = TypeVar("T")


@mypyc_attr(allow_interpreted_subclasses=True)
class Task(Generic[T]):
    """A coroutine that runs beside its parent and ends with it. Await it for its value."""

    __slots__ = (
        "cancelled", "children", "coroutine", "error", "finished", "index",
        "parent", "result", "since", "state", "token", "waits_for", "watchers",
    )  # fmt: skip

    def __init__(
        self, state: NodeState, coroutine: Coroutine[Any, Any, T] | None, parent: Task[Any] | None, index: int
    ) -> None:
        self.state: Any = state  # the runtime's own: more than a program sees of it
        self.coroutine, self.parent, self.index = coroutine, parent, index
        self.finished = self.cancelled = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self.children: list[Task[Any]] = []
        self.token = 0  # counts resumptions: a wake-up for an earlier wait is void
        self.waits_for: Op[Any] | None = None
        self.since = 0.0
        self.watchers: tuple[tuple[Task[Any], int], ...] = ()  # hardly ever more than one

    def __await__(self) -> Generator[Any, Any, T]:
        return Join(self).__await__()

    @property
    def done(self) -> bool:
        """Whether it has ended: returned, failed, or been cancelled."""
        return bool(self.state.port.observe(self.state, lambda: self.finished))

    @property
    def value(self) -> T:
        """What it returned. Raises its error, or EdgeflError while it has not ended or when cancelled."""
        if not self.done:
            raise EdgeflError("this task has not ended yet")
        return self.outcome()

    def outcome(self) -> T:
        """The value of an ended task, or its error raised."""
        if self.error is not None:
            raise self.error
        if self.cancelled:
            raise EdgeflError("this task was cancelled")
        return self.result  # type: ignore[return-value]

    def cancel(self) -> None:
        """End it now, with its children and what it awaits; nothing happens if it has ended."""
        self.state.port.cancel_task(self)

    def describe(self) -> str:
        inner = self.waits_for.describe() if self.waits_for is not None else "its turn"
        return f"a child that waits for {inner}"


@mypyc_attr(allow_interpreted_subclasses=True)
class Transfer:
    """A message on its way to one or more receivers. Await it: the uplink is free of it again."""

    __slots__ = (
        "cancelled", "flows", "message", "receivers", "sent_at", "state",
        "unacknowledged", "undeliverable", "unsent", "watchers",
    )  # fmt: skip

    def __init__(
        self, state: NodeState, message: Message, receivers: tuple[int, ...], sent_at: float
    ) -> None:
        self.state: Any = state
        self.message, self.receivers, self.sent_at = message, receivers, sent_at
        self.unsent = self.unacknowledged = len(receivers)
        self.undeliverable: tuple[int, ...] = ()
        self.cancelled = False
        self.flows: list[Any] = []
        self.watchers: tuple[tuple[Task[Any], int], ...] = ()  # hardly ever more than one

    def __await__(self) -> Generator[Any, Any, None]:
        return Left(self).__await__()

    @property
    def done(self) -> bool:
        """Whether the uplink is free of it."""
        return bool(self.state.port.observe(self.state, lambda: self.unsent == 0 or self.cancelled))

    @property
    def delivered(self) -> Op[None]:
        """Await it: all receivers have acknowledged, or Unreachable is raised."""
        return Delivered(self)

    def cancel(self) -> None:
        """Stop sending. What has left is charged; the receivers see nothing of it."""
        self.state.port.cancel_transfer(self)

    def describe(self) -> str:
        to = ", ".join(map(str, self.receivers[:4])) + (", ..." if len(self.receivers) > 4 else "")
        return f"{type(self.message).__name__} to {to} to leave"
