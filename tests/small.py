"""Small learning runs for tests: digits, an MLP, a fleet of equal devices, on the virtual runtime."""

from __future__ import annotations

from functools import cache
from typing import Any

from toy import FAST, PROFILE, Watcher

from edgefl.data import Dataset, LocalData
from edgefl.data.config import DataConfig, PartitionConfig
from edgefl.data.load import load_dataset
from edgefl.data.partition import partition
from edgefl.learning.executors import make_executor
from edgefl.learning.learner import Learner
from edgefl.learning.models import ModelConfig, build_model
from edgefl.learning.poison import Poison
from edgefl.learning.workload import TrainConfig, Workload
from edgefl.network import Access, NetworkPlan
from edgefl.network.graphs import make_topology
from edgefl.network.mixing import metropolis
from edgefl.nodes.method import Method
from edgefl.nodes.plan import FaultPlan, NodeSpec, RunPlan
from edgefl.nodes.registry import find_method
from edgefl.parameters.compress import CompressConfig
from edgefl.runtimes.outcome import Outcome
from edgefl.runtimes.virtual import VirtualRuntime


@cache
def digits() -> Dataset:
    return load_dataset(DataConfig(name="digits"))


def small_plan(
    method: str | Method,
    num_devices: int,
    *,
    rounds: int | None = 3,
    time_s: float | None = None,
    seed: int = 1,
    topology: str | None = None,
    train: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    data: str | dict[str, Any] = "iid",
    access: Access | list[Access] = FAST,
    link_model: str = "fifo",
    profiles: list[Any] | None = None,
    slowdowns: list[float] | None = None,
    faults: FaultPlan | None = None,
    equal_shares: bool = False,
    device: str = "cpu",
    mixing: Any = None,
    compress: dict[str, Any] | None = None,
    poison: dict[int, Poison] | None = None,
    dataset: Dataset | None = None,
    parts: list[LocalData] | None = None,
    **config: Any,
) -> RunPlan:
    """A plan for so many devices, and the nodes beside them where the method has some.

    poison: hostile nodes by id. dataset, parts: other data than digits, and each device's share of it.
    """
    method = find_method(method) if isinstance(method, str) else method
    settings = method.config(**config)
    helpers = len(method.helper_roles(settings))
    dataset = dataset or digits()
    kind = {"name": data} if isinstance(data, str) else data
    holders = 1 if method.pools_data else num_devices
    parts = parts or partition(dataset, holders, PartitionConfig.model_validate(kind), seed)
    if equal_shares:
        least = min(map(len, parts))
        parts = [type(p)(p.dataset, p.indices[:least], p.node, p.seed) for p in parts]
    n = holders if method.pools_data else num_devices + helpers
    shape = topology or {"star": "star", "complete": "complete", "bipartite": "bipartite-complete"}.get(
        method.needs, "ring"
    )
    graph = make_topology(shape, n, seed)
    training = TrainConfig(**({"learning_rate": 0.1, "batch_size": 16, "local_steps": 2} | (train or {})))
    problem = build_model(ModelConfig.model_validate({"name": "mlp"} | (model or {})), dataset, seed)
    learner = Learner(problem, training, total_rounds=rounds, device=device)
    roles = method.roles_of(graph, settings)
    nodes = []
    for i, role in enumerate(roles):
        mine = i if method.pools_data else i - helpers
        nodes.append(
            NodeSpec(
                role,
                profiles[i] if profiles else PROFILE,
                Workload.of(training),
                parts[mine] if mine >= 0 else None,
                slowdowns[i] if slowdowns else 1.0,
                (poison or {}).get(i),
            )
        )
    links = tuple(access) if isinstance(access, list) else (access,) * n
    return RunPlan(
        seed=seed,
        method=method,
        config=settings,
        nodes=tuple(nodes),
        network=NetworkPlan(graph, links, link_model),  # type: ignore[arg-type]
        learner=learner,
        rounds=rounds,
        time_s=time_s,
        mixing=mixing or metropolis(graph),
        faults=faults or FaultPlan(),
        compress=CompressConfig(**(compress or {})),
    )


def run_small(
    method: str | Method,
    num_devices: int,
    *,
    watcher: Watcher | None = None,
    executor: str = "auto",
    **plan: Any,
) -> Outcome:
    """Run a method on a small fleet in virtual time."""
    made = small_plan(method, num_devices, **plan)
    assert made.learner is not None
    return VirtualRuntime(made, watcher or Watcher(), make_executor(executor, made.learner)).run()
