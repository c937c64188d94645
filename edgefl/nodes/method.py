"""Method: what a paper's algorithm declares about itself."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from edgefl.data import LocalData
from edgefl.learning.learner import Learner
from edgefl.learning.work import LocalSGD
from edgefl.learning.workload import Workload
from edgefl.messages.base import Message
from edgefl.network import Topology
from edgefl.nodes.node import Node

Program = Callable[[Node], Coroutine[Any, Any, Any]]
Needs = Literal["star", "complete", "bipartite", "connected", "any"]
Evaluates = Literal["server", "each", "mean", "parts", "personal"]


class MethodConfig(BaseModel):
    """Base of a method's own settings: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Faults:
    """Which faults a method outlives with its invariants whole."""

    crashes: bool = False
    returns: bool = False
    partitions: bool = False
    delays: bool = True
    """Late and reordered senders."""
    silence: bool = False
    """A node that stops answering without anybody being told that it is gone: only deadlines help."""


@dataclass(frozen=True)
class Check:
    """An invariant: `holds(outcome)` is True, or a sentence that says what is wrong."""

    name: str
    holds: Callable[[Any], bool | str]


@dataclass(frozen=True)
class Method:
    """A paper's algorithm as node programs, one per role, and what it asks of a run.

    roles: programs by role, the server's first where there is one. ends_with: the run ends when all
    nodes of these roles have returned; the others are cancelled. needs: the topology. evaluates: what
    final accuracy means: the server's model, each node's own (mean over nodes), the mean model, the
    parts of one model joined, or personal: each client's own part with the server's model for the rest.
    stateless: roles that carry nothing from one receive at the top of their loop to the next. may_fail:
    roles whose failure is a crash and not the end of the run.
    """

    name: str
    title: str
    paper: str
    roles: Mapping[str, Program]
    messages: tuple[type[Message], ...]
    ends_with: tuple[str, ...]
    needs: Needs
    evaluates: Evaluates
    config: type[MethodConfig] = MethodConfig
    assign_roles: Callable[[Topology], tuple[str, ...]] | None = None
    """Roles by id on a topology; default: the helpers first, the rest have the last role."""
    helpers: Callable[[Any], tuple[str, ...]] | None = None
    """Roles, by id from 0, of the nodes beside the fleet's devices, given the config; they hold no data.
    Default: one "server" where there is that role."""
    compresses: bool = False
    """Its updates can be compressed, as [compress] says."""
    widths: Callable[[Any], tuple[float, ...]] | None = None
    """Shares of every hidden layer's units of which [assign] may plan one for each node, given the config;
    None: its nodes train the whole model."""
    narrow_training: Callable[[Any, Learner, LocalData, Workload], LocalSGD] | None = None
    """The costliest local training of a round at the width of a workload, given the config; default: LocalSGD
    of the narrowed model."""
    pools_data: bool = False
    """The fleet is one node that holds all data: a reference without distribution."""
    prepare: Callable[[Any], None] | None = None
    """Refuses a plan that it cannot run (ConfigError), before anything starts."""
    memory: Callable[[Any], Mapping[int, int]] | None = None
    """Bytes that each node of a plan needs at once; default: those that hold data train the whole model."""
    tolerates: Faults = field(default_factory=Faults)
    invariants: tuple[Check, ...] = ()
    stateless: tuple[str, ...] = ()
    may_fail: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The folder that its module lies in."""
        program = next(iter(self.roles.values()))
        parts = program.__module__.split(".")
        return parts[-2] if len(parts) > 1 else "yours"

    @property
    def has_server(self) -> bool:
        """Whether node 0 is a server beside the devices of the fleet."""
        return "server" in self.roles

    def helper_roles(self, config: Any) -> tuple[str, ...]:
        """The roles of the nodes beside the fleet's devices; these have the lowest ids."""
        if self.helpers is not None:
            return self.helpers(config)
        return ("server",) if self.has_server and not self.pools_data else ()

    def roles_of(self, topology: Topology, config: Any = None) -> tuple[str, ...]:
        """The role of each node, by id."""
        if self.assign_roles is not None:
            return self.assign_roles(topology)
        *_, last = self.roles
        helpers = self.helper_roles(config)
        return helpers + (last,) * (topology.n - len(helpers))
