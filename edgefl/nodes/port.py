"""The seam between a Node and a runtime: all that a runtime must offer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from edgefl.messages.base import Message
from edgefl.nodes.operations import Op, Receive

if TYPE_CHECKING:
    from edgefl.learning.workload import Workload
    from edgefl.nodes.handles import Task, Transfer
    from edgefl.parameters import Vector

T = TypeVar("T")


class NodeState(Protocol):
    """What a runtime keeps of one node; opaque to programs. workload: of this life."""

    workload: Workload

    @property
    def port(self) -> Port: ...


class Port(Protocol):
    """What a Node, a Task or a Transfer asks of its runtime. Operations that are awaited come by `yield`."""

    def now(self, state: Any) -> float: ...
    def observe(self, state: Any, look: Callable[[], T]) -> T:
        """Look at something that changes with time; a resumed program sees again what it saw."""
        ...

    def start(self, state: Any, work: Coroutine[Any, Any, T] | Op[T]) -> Task[T]: ...
    def cancel_task(self, task: Task[Any]) -> None: ...
    def send(
        self, state: Any, receivers: tuple[int, ...], message: Message, rate_bytes_per_s: float | None
    ) -> Transfer: ...
    def cancel_transfer(self, transfer: Transfer) -> None: ...
    def take(self, state: Any, pattern: Receive) -> list[Any]: ...
    def living(self, state: Any, ids: Sequence[int]) -> tuple[int, ...]: ...
    def publish(self, state: Any, parameters: Vector, step: int, part: str | None) -> None: ...
    def record(self, state: Any, metrics: dict[str, float]) -> None: ...
    def note(self, state: Any, kind: str, detail: str) -> None: ...
