"""Where the nodes of a run live: the fleet file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from edgefl.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """One process among those of a run: its index, everybody's address, and who hosts which nodes.

    addresses: "host:port" by process. nodes_of: node ids by process; together 0..n-1, each once. The
    process with index 0 hosts node 0, leads, and keeps the run folder. lab: all processes are on one machine,
    whatever their addresses, on links that are shaped for real.
    """

    run_id: str
    index: int
    addresses: tuple[str, ...]
    nodes_of: tuple[tuple[int, ...], ...]
    lab: bool = False

    @property
    def hosted(self) -> tuple[int, ...]:
        return self.nodes_of[self.index]

    @property
    def num_nodes(self) -> int:
        return sum(map(len, self.nodes_of))

    @property
    def on_loopback(self) -> bool:
        """Whether no byte between the processes leaves this machine's loopback."""
        return all(_is_loopback(address.rpartition(":")[0]) for address in self.addresses)

    @property
    def alone_on_its_machine(self) -> bool:
        """Whether this process hosts one node, and no other process has its host."""
        hosts = [address.rpartition(":")[0] for address in self.addresses]
        own = hosts[self.index]
        return len(self.hosted) == 1 and hosts.count(own) == 1 and not _is_loopback(own) and not self.lab

    def process_of(self, node: int) -> int:
        """The process that hosts a node."""
        return next(p for p, nodes in enumerate(self.nodes_of) if node in nodes)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]") or host.startswith("127.")


@dataclass(frozen=True)
class FleetFile:
    """A fleet file: `run_id`, `experiment` (a path beside it), [[process]] tables with address and nodes.

    lab: as in `Place`; where not given, the processes are on machines of their own.
    """

    run_id: str
    experiment: Path
    addresses: tuple[str, ...]
    nodes_of: tuple[tuple[int, ...], ...]
    lab: bool = False

    def place(self, node: int) -> Place:
        """The place of the process that hosts `node`. Raises ConfigError where none does."""
        for index, nodes in enumerate(self.nodes_of):
            if node in nodes:
                return Place(self.run_id, index, self.addresses, self.nodes_of, self.lab)
        raise ConfigError("--id", node, f"the fleet file has nodes 0 to {sum(map(len, self.nodes_of)) - 1}")

    def to_toml(self) -> str:
        lines = [f'run_id = "{self.run_id}"', f'experiment = "{self.experiment}"']
        lines += ["lab = true"] if self.lab else []
        for address, nodes in zip(self.addresses, self.nodes_of, strict=True):
            lines += ["", "[[process]]", f'address = "{address}"', f"nodes = {list(nodes)}"]
        return "\n".join(lines) + "\n"


def read_fleet(path: Path) -> FleetFile:
    """Read and check a fleet file. Raises ConfigError, one line, for what is wrong in it."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError("--fleet", str(path), "no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("--fleet", str(path), f"it is not TOML: {error}") from None
    unknown = sorted(table.keys() - {"run_id", "experiment", "lab", "process"})
    if unknown:
        raise ConfigError(
            f"fleet.{unknown[0]}", table[unknown[0]], "known keys: experiment, lab, process, run_id"
        )
    run_id, experiment, processes = table.get("run_id"), table.get("experiment"), table.get("process")
    if not isinstance(run_id, str) or not run_id:
        raise ConfigError("fleet.run_id", run_id, "a text that names this run is needed")
    if not isinstance(experiment, str):
        raise ConfigError("fleet.experiment", experiment, "the path of an experiment file is needed")
    if not isinstance(processes, list) or not processes:
        raise ConfigError("fleet.process", processes, "one [[process]] table per process is needed")
    lab = table.get("lab", False)
    if not isinstance(lab, bool):
        raise ConfigError("fleet.lab", lab, "true or false")
    addresses, nodes_of = zip(*(_process(p, i) for i, p in enumerate(processes)), strict=True)
    ids = sorted(i for nodes in nodes_of for i in nodes)
    if ids != list(range(len(ids))):
        raise ConfigError(
            "fleet.process.nodes", ids, "node ids 0, 1, 2, ..., each at one process, are needed"
        )
    if 0 not in nodes_of[0]:
        raise ConfigError("fleet.process.nodes", list(nodes_of[0]), "the first process hosts node 0")
    return FleetFile(run_id, path.parent / experiment, addresses, nodes_of, lab)


def _process(table: object, index: int) -> tuple[str, tuple[int, ...]]:
    key = f"fleet.process[{index}]"
    if not isinstance(table, dict) or table.keys() != {"address", "nodes"}:
        raise ConfigError(key, table, "a table with address and nodes is needed")
    address, nodes = table["address"], table["nodes"]
    host, _, port = str(address).rpartition(":")
    if not isinstance(address, str) or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{key}.address", address, 'like "192.168.1.20:50051"')
    if not isinstance(nodes, list) or not nodes or not all(type(i) is int and i >= 0 for i in nodes):
        raise ConfigError(f"{key}.nodes", nodes, "a list of node ids")
    return address, tuple(nodes)
