"""Checkpoints of the virtual runtime: its state as data, and programs brought back from their logs.

A checkpoint holds the kernel (clock, heap, flows, processors, inboxes), each node's saved state and the
log of its programs since. What the plan holds (data, model, devices) is referred to, not stored. Restoring
builds only the classes named here, so a foreign file can run no code; it is read from the run's own folder
all the same.
"""

from __future__ import annotations

import builtins
import importlib
import io
import pickle
from collections.abc import Callable, Iterator
from types import BuiltinMethodType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edgefl.data import LocalData, WeightedData
from edgefl.errors import ConfigError
from edgefl.learning.model import Model
from edgefl.nodes.handles import Task
from edgefl.nodes.node import Node
from edgefl.nodes.plan import NodeSpec, RunPlan
from edgefl.parameters import Layout
from edgefl.runtimes.log import Replay

if TYPE_CHECKING:
    from edgefl.runtimes.virtual.runtime import VirtualRuntime

_KEPT = (
    "_time_s", "_heap", "_soon", "_last", "_sequence", "num_events", "_num_ticks", "_num_aside", "_flat",
    "_links", "_lanes", "_leaving", "_draws", "_workshop", "states", "traffic", "results", "awaited",
    "dropped",
)  # fmt: skip
_ROOMS = ("data", "learning", "messages", "methods", "nodes", "parameters", "patterns", "runtimes")
_PLAIN = {
    ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "int"), ("builtins", "complex"),
    ("builtins", "slice"), ("builtins", "range"), ("builtins", "bytearray"), ("collections", "deque"),
    ("collections", "Counter"), ("collections", "defaultdict"), ("collections", "OrderedDict"),
    ("numpy", "ndarray"), ("numpy", "dtype"), ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"), ("numpy._core.numeric", "_frombuffer"), ("pathlib", "PosixPath"),
}  # fmt: skip


def take_checkpoint(runtime: VirtualRuntime, observer: dict[str, Any]) -> bytes:
    """The runtime between two events, and `observer`, the observer's own state, as bytes.

    Raises pickle.PicklingError (or TypeError) for a program that holds what cannot be stored.
    """
    runtime.finish_work()
    out = io.BytesIO()
    pickler = _Pickler(out, _references(runtime))
    kept = {name: getattr(runtime, name) for name in _KEPT}
    coroutines = [(task, task.coroutine) for task in _tasks(runtime)]
    for task, _ in coroutines:
        task.coroutine = None
    try:
        pickler.dump((kept, observer))
    finally:
        for task, coroutine in coroutines:
            task.coroutine = coroutine
    return out.getvalue()


def restore_checkpoint(runtime: VirtualRuntime, data: bytes) -> dict[str, Any]:
    """Put a fresh runtime of the same plan where the checkpoint was taken; returns the observer's state.

    Raises ConfigError for bytes that are no checkpoint of this plan.
    """
    try:
        kept, observer = _Unpickler(io.BytesIO(data), _references(runtime), runtime.plan).load()
        for name in _KEPT:
            setattr(runtime, name, kept[name])
    except (pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            "--resume", "checkpoint", f"this run's own checkpoint is needed ({error})"
        ) from error
    runtime.observer.begin(runtime.traffic)
    for state in runtime.states.values():
        if state.main is not None and not state.main.finished:
            program = runtime.plan.method.roles[runtime.plan.nodes[state.id].role]
            state.workload = state.log.workload  # what it planned anew since, it plans again
            view = Node(runtime.plan, state.id, state.life, state, state.log.saved)
            runtime.replay = Replay(state.log, state.main, program(view))
            try:
                runtime.replay.run()
            finally:
                runtime.replay = None
    return observer  # type: ignore[no-any-return]


def _tasks(runtime: VirtualRuntime) -> Iterator[Task[Any]]:
    """All tasks that hold a coroutine."""
    for state in runtime.states.values():
        waiting = [state.main] if state.main is not None else []
        while waiting:
            task = waiting.pop()
            waiting += task.children
            yield task


def _references(runtime: VirtualRuntime) -> dict[str, object]:
    """What a checkpoint refers to by name, because the plan holds it."""
    plan = runtime.plan
    named: dict[str, object] = {
        "runtime": runtime,
        "plan": plan,
        "network": plan.network,
        "codec": runtime.codec,
    }
    named |= {"executor": runtime.executor, "learner": plan.learner, "config": plan.config}
    for i, spec in enumerate(plan.nodes):
        named |= {f"node {i}": spec, f"data {i}": spec.data, f"workload {i}": spec.workload}
        if spec.data is not None:
            named[f"dataset {i}"] = spec.data.dataset
    if plan.learner is not None:
        model = plan.learner.model
        last = len(model.blocks)
        for a in range(last):
            for b in range(a + 1, last + 1):
                stage = model.stage(a, b)
                named |= {f"model {a}:{b}": stage, f"layout {a}:{b}": stage.layout}
        named |= {"model": model, "layout": model.layout}
        for sizes, narrower in model.narrower.items():
            named |= {f"narrower model {sizes}": narrower, f"narrower layout {sizes}": narrower.layout}
    return named


def _narrower(model: Model, name: str) -> object:
    """A narrower model or its layout by the name that it has in a checkpoint."""
    _, kind, sizes = name.split(" ", 2)
    found = model.narrowed(tuple(int(n) for n in sizes.strip("(),").split(",")))
    return found if kind == "model" else found.layout


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, named: dict[str, object]) -> None:
        super().__init__(out, protocol=5)
        self._names = {id(value): name for name, value in named.items() if value is not None}

    def persistent_id(self, thing: object) -> str | None:
        name = self._names.get(id(thing))
        of_plan = isinstance(thing, RunPlan | NodeSpec | LocalData | Model | Layout)
        if name is None and of_plan and not isinstance(thing, WeightedData):  # these are made on the way
            raise pickle.PicklingError(f"{thing!r} is not of this plan")
        return name

    def reducer_override(self, thing: Any) -> Any:
        compiled = isinstance(thing, BuiltinMethodType) and _is_of_the_runtime(thing.__self__)
        if compiled or isinstance(thing, MethodType):
            return _bound, (thing.__self__, thing.__name__)
        if isinstance(thing, torch.Tensor):
            return _tensor, (_raw(thing), str(thing.dtype).removeprefix("torch."), tuple(thing.shape))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, named: dict[str, object], plan: RunPlan) -> None:
        super().__init__(data)
        self._named, self._plan = named, plan
        self._own = {program.__module__ for program in plan.method.roles.values()}

    def persistent_load(self, name: str) -> object:
        if name.startswith("narrower ") and self._plan.learner is not None:
            return _narrower(self._plan.learner.model, name)
        return self._named[name]

    def find_class(self, module: str, name: str) -> Any:
        """Only what a checkpoint can hold: classes of the rooms, functions of methods, a few plain types."""
        if (module, name) in _PLAIN:
            return getattr(importlib.import_module(module), name)
        if module == __name__ and name in ("_bound", "_tensor"):
            return globals()[name]
        if module == "builtins":
            found = getattr(builtins, name, None)
            if isinstance(found, type) and issubclass(found, Exception):
                return found
        parts = module.split(".")
        in_a_room = parts[0] == "edgefl" and len(parts) > 1 and parts[1] in (*_ROOMS, "errors")
        if (in_a_room or module in self._own) and "." not in name:
            found = getattr(importlib.import_module(module), name, None)
            ours = getattr(found, "__module__", None) == module
            callable_here = module in self._own or (in_a_room and parts[1] in ("methods", "patterns"))
            if ours and (isinstance(found, type) or (callable_here and isinstance(found, FunctionType))):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def _bound(owner: object, name: str) -> Callable[..., Any]:
    """A bound method of the runtime's own objects."""
    if not _is_of_the_runtime(owner):
        raise pickle.UnpicklingError(f"{name} of a {type(owner).__name__} has no place in a checkpoint")
    return getattr(owner, name)  # type: ignore[no-any-return]


def _is_of_the_runtime(owner: object) -> bool:
    return type(owner).__module__.startswith("edgefl.runtimes.")


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _tensor(raw: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise pickle.UnpicklingError(f"{dtype} is no dtype")
    if not raw:
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).view(kind).reshape(shape)
