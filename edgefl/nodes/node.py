"""Node: all that a program sees of the world."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Coroutine, Generator, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from edgefl.data import Batch, LocalData
from edgefl.keyed import generator
from edgefl.learning.cost import duration_s
from edgefl.learning.work import LocalSGD
from edgefl.learning.work_costs import gradient_cost
from edgefl.messages.base import Message
from edgefl.nodes.operations import Compute, First, Op, Receive, Save, Sleep

if TYPE_CHECKING:
    from edgefl.devices import DeviceProfile
    from edgefl.learning.learner import Learner
    from edgefl.learning.model import Model
    from edgefl.learning.optimizer import Optimizer
    from edgefl.learning.work import Work
    from edgefl.learning.workload import Workload
    from edgefl.network import Access, Topology
    from edgefl.nodes.handles import Task, Transfer
    from edgefl.nodes.plan import RunPlan
    from edgefl.nodes.port import NodeState
    from edgefl.parameters import Vector

T = TypeVar("T")
M = TypeVar("M", bound=Message)
F = TypeVar("F")


class FleetView:
    """What one node knows of the others: the plan, and who is alive as far as it has heard."""

    def __init__(self, plan: RunPlan, node: int, state: NodeState) -> None:
        self._plan, self._node, self._state = plan, node, state

    def ids(self, role: str | None = None) -> tuple[int, ...]:
        """All nodes, or those of a role, ascending; this one included."""
        return self._plan.ids(role)

    @property
    def neighbors(self) -> tuple[int, ...]:
        """This node's neighbors in the topology, ascending."""
        return self._plan.network.topology.neighbors(self._node)

    @property
    def topology(self) -> Topology:
        """The planned graph."""
        return self._plan.network.topology

    @property
    def W(self) -> dict[int, float]:
        """This node's row of the mixing matrix: W[i, j] by j, its own share included."""
        return self._plan.mixing_row(self._node)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Nodes that hold data, in groups of like speed, the fastest first; one group unless [assign] says
        otherwise."""
        return self._plan.groups

    def role(self, j: int) -> str:
        return self._plan.nodes[j].role

    def profile(self, j: int) -> DeviceProfile:
        """The planned device of node j."""
        return self._plan.nodes[j].profile

    def workload(self, j: int) -> Workload:
        """The planned workload of node j."""
        return self._plan.nodes[j].workload

    def step_s(self, j: int) -> float:
        """Planned seconds of one mini-batch gradient at node j. Raises ValueError without a [model]."""
        if self._plan.learner is None:
            raise ValueError("this run has no [model]")
        batch_size = self.workload(j).batch_size
        return duration_s(gradient_cost(self._plan.learner.model, batch_size, batch_size), self.profile(j))

    def work_s(self, j: int, work: Work) -> float:
        """Planned seconds of this work at node j. Raises ValueError without a [model]."""
        if self._plan.learner is None:
            raise ValueError("this run has no [model]")
        return duration_s(work.cost(self._plan.learner), self.profile(j))

    def num_examples(self, j: int) -> int:
        """How many training examples node j holds, 0 without data."""
        data = self._plan.nodes[j].data
        return 0 if data is None else len(data)

    def pooled_data(self) -> LocalData:
        """All training examples of the fleet, as on a storage that every node shares.

        Raises ValueError when nobody holds data.
        """
        parts = [spec.data for spec in self._plan.nodes if spec.data is not None]
        if not parts:
            raise ValueError("no node of this fleet holds data")
        everything = np.sort(np.concatenate([part.indices for part in parts]))
        return LocalData(parts[0].dataset, everything, 0, parts[0].seed)

    def held_out(self, num_examples: int) -> Batch:
        """At most so many examples that no node trains on, drawn from the test part, the same each time.

        Raises ValueError when nobody holds data.
        """
        dataset = next((s.data.dataset for s in self._plan.nodes if s.data is not None), None)
        if dataset is None:
            raise ValueError("no node of this fleet holds data")
        order = generator(self._plan.seed, "held out").permutation(len(dataset.x_test))
        places = torch.from_numpy(np.sort(order[:num_examples]))
        return Batch(dataset.x_test.index_select(0, places), dataset.y_test.index_select(0, places))

    @property
    def link_model(self) -> str:
        """How flows share links in virtual time: fair, local-fair or fifo."""
        return self._plan.network.link_model

    @property
    def segments(self) -> Mapping[str, float]:
        """Planned rate of each shared segment, bytes per second."""
        return self._plan.network.segments

    def cap(self, i: int, j: int) -> float:
        """Most bytes per second of one flow from i to j, whatever its ends could do."""
        return self._plan.network.cap(i, j)

    def access(self, j: int) -> Access:
        """Node j's planned connection to the network: rates up and down, latency."""
        return self._plan.network.access[j]

    def rate_bytes_per_s(self, i: int, j: int) -> float:
        """Planned rate from i to j for a transfer that has the links to itself."""
        return self._plan.network.rate_bytes_per_s(i, j)

    def latency_s(self, i: int, j: int) -> float:
        """Planned one-way latency from i to j."""
        return self._plan.network.latency_s(i, j)

    def once(self, key: Hashable, find: Callable[[], F]) -> F:
        """What find() gives, found once for all that ask with this key: for planners, which take their time.

        key: what the result depends on besides the planned fleet.
        """
        if key not in self._plan.found:
            self._plan.found[key] = find()
        found: F = self._plan.found[key]
        return found

    def alive(self, j: int) -> bool:
        """Whether node j lives, as last detected."""
        return self.living((j,)) != ()

    def living(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Those of `ids` that live, as last detected, in their order."""
        return self._state.port.living(self._state, ids)


class Watched(Op[Any]):
    """A node's computing, whose duration the node hears of."""

    __slots__ = ("_computing", "_node")

    def __init__(self, computing: Compute[Any], node: Node) -> None:
        self._computing, self._node = computing, node

    def __await__(self) -> Generator[Any, Any, Any]:
        began_s = self._node.now()
        result = yield self._computing
        if isinstance(self._computing.work, LocalSGD):
            self._node._trained(self._computing.work, self._node.now() - began_s)
        return result


class Node:
    """One life of a node, as its program sees it. Every `await` in a program is on one of these."""

    def __init__(
        self, plan: RunPlan, node: int, life: int, state: NodeState, saved: Mapping[str, Any] | None
    ) -> None:
        spec = plan.nodes[node]
        self.id, self.role, self.life = node, spec.role, life
        self.seed = plan.seed
        self.config: Any = plan.config
        """The method's own settings."""
        self.data: LocalData | None = spec.data
        self.compress = plan.compress
        """The [compress] table."""
        self.fleet = FleetView(plan, node, state)
        self.saved = saved
        """What save() wrote in an earlier life or before an interruption; None at a first start."""
        self._plan, self._state, self._port = plan, state, state.port

    @property
    def workload(self) -> Workload:
        """As planned, or as planned anew in this life for what training took ([assign] replan_above)."""
        return self._state.workload

    @property
    def learner(self) -> Learner:
        if self._plan.learner is None:
            raise ValueError("this run has no [model]")
        return self._plan.learner

    @property
    def model(self) -> Model:
        """The run's model: layout, init(), stage(a, b). It holds no parameters: they are values."""
        return self.learner.model

    @property
    def optimizer(self) -> Optimizer:
        """[train]'s optimiser as pure functions: init(layout), step(parameters, gradient, state, round)."""
        return self.learner.optimizer

    @property
    def num_rounds(self) -> int | None:
        """[stop] rounds; None where a run ends by time or target only."""
        return self._plan.rounds

    @property
    def end_s(self) -> float | None:
        """[stop] time_s; None where a run ends by rounds or target only."""
        return self._plan.time_s

    def rounds(self, start: int = 0) -> Iterator[int]:
        """start, start + 1, ... up to [stop] rounds, or without end where that is not given."""
        stop = self.num_rounds
        return iter(range(start, stop)) if stop is not None else itertools.count(start)

    def now(self) -> float:
        """Seconds since the run began; goes on after a resume."""
        return self._port.now(self._state)

    def rng(self, purpose: str, *key: int) -> np.random.Generator:
        """A fresh generator keyed by (seed, purpose, this node, key)."""
        return generator(self.seed, purpose, self.id, *key)

    def shared_rng(self, purpose: str, *key: int) -> np.random.Generator:
        """A fresh generator keyed by (seed, purpose, key): the same on every node."""
        return generator(self.seed, purpose, -1, *key)

    def sleep(self, seconds: float) -> Op[None]:
        return Sleep(seconds)

    def compute(self, work: Work, *, share: float | None = None) -> Op[Any]:
        """Have this node's processor carry out `work`: queued, or beside the queue on a reserved share.

        Returns what the work returns; raises what it raises. Inputs are what they are now.
        """
        computing: Compute[Any] = Compute(work, share)
        return computing if self._plan.replan is None else Watched(computing, self)

    def _trained(self, work: LocalSGD, seconds: float) -> None:
        """Take note of what a round's local training took, and plan the next ones for it."""
        assert self._plan.replan is not None
        if work.workload is not self.workload or work.part is not None:
            return
        new = self._plan.replan(self.id, self.workload, seconds)
        if new is not None:
            was, steps = self.workload, work.steps
            now = f"{new.num_steps(len(work.data))} steps of {new.batch_size}"
            self.note("replanned", f"{len(steps)} steps of {was.batch_size} took {seconds:.3g} s; now {now}")
            self._state.workload = new

    def send(
        self, to: int | Collection[int], message: Message, *, rate_bytes_per_s: float | None = None
    ) -> Transfer:
        """Start sending now, one payload to one or many; rate_bytes_per_s: paced at a reserved rate.

        Raises ValueError for a node that does not exist. Nothing is sent while a node crashes.
        """
        if isinstance(to, int):
            receivers: tuple[int, ...] = (int(to),)
        else:
            receivers = (int(to),) if isinstance(to, np.integer) else tuple(map(int, to))
        return self._port.send(self._state, receivers, message, rate_bytes_per_s)

    def receive(
        self,
        *kinds: type[M],
        sender: int | Collection[int] | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Op[M]:
        """The oldest message of these kinds, from this sender or one of these, with these field values.

        Waits; None after timeout_s seconds. Messages that do not match stay for later. List Gone to
        hear of a death while waiting: a dead sender that is named answers at once.
        """
        return Receive(kinds, sender, timeout_s, fields)

    def take(self, *kinds: type[M], **fields: Any) -> list[M]:
        """All messages of these kinds that have arrived, oldest first, without waiting."""
        return self._port.take(self._state, Receive(kinds, None, None, fields))

    def first(self, *ops: Op[Any] | Task[Any] | Transfer, timeout_s: float | None = None) -> Op[Any]:
        """Wait for the first of receives, tasks and transfers.

        Returns the message of a receive, or the task or transfer itself that is done; None after
        timeout_s seconds. What comes later is still there: losers lose nothing.
        """
        return First(ops, timeout_s)

    def start(self, work: Coroutine[Any, Any, T] | Op[T]) -> Task[T]:
        """Run a coroutine or an operation beside this one; it ends with the task that started it."""
        return self._port.start(self._state, work)

    def save(self, **state: Any) -> Op[None]:
        """Make this the state from which the program goes on after a crash or an interruption.

        Values: what messages may carry, and dictionaries and lists of that. One whole or nothing.
        """
        return Save(state)

    def store(self, **state: Any) -> Op[None]:
        """As save, and wait until it is on the disk: what is done next may rely on it."""
        return Save(state, stored=True)

    def publish(self, parameters: Vector, *, step: int, part: str | None = None) -> None:
        """My model is now this: what the observer evaluates. step: rounds or local steps so far."""
        self._port.publish(self._state, parameters, step, part)

    def record(self, **metrics: float) -> None:
        """Write metrics of this node at this moment to the run's records."""
        self._port.record(self._state, metrics)

    def note(self, kind: str, detail: str) -> None:
        """Write a line of its own to the run's events: that an update was refused, and why."""
        self._port.note(self._state, kind, detail)
