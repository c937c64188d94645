"""The experiment file: one TOML file says what is run."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from edgefl.data import DataConfig
from edgefl.data.load import SOURCES
from edgefl.devices import device
from edgefl.errors import ConfigError, nearest
from edgefl.experiment.tables import (
    EvaluateTable,
    Execution,
    FaultsTable,
    Fleet,
    MethodTable,
    Network,
    Roles,
    Stop,
    Table,
)
from edgefl.experiment.toml import checked, read_toml, refuse_deep, write_toml
from edgefl.learning.executors import even_group
from edgefl.learning.models import ModelConfig
from edgefl.learning.workload import TrainConfig
from edgefl.parameters.compress import CompressConfig
from edgefl.planning.workloads import AssignConfig

MOST_LETTERS = 100
"""Of an experiment's name, which is part of its folder's."""
FAIR_UP_TO = 300
"""Nodes up to which flows share links by max-min unless the file says otherwise."""
_DENSE = ("linear", "mlp")
_NAMES_NOT_KEYS = (
    ("fleet", "devices"),
    ("fleet", "stragglers"),
    ("network", "link"),
    ("network", "segments"),
    ("network", "stragglers"),
    ("network", "traces"),
)
"""Tables whose keys are names of things: an overlay replaces them whole."""
_INSTEAD = {"train.local_steps": "local_epochs", "train.local_epochs": "local_steps"}
"""Keys of which a file has one: --set of the one takes the other's place."""

_PATHS = (
    ("method", "name"),
    ("model", "load"),
    ("data", "folder"),
    ("network", "mixing"),
    ("network", "topology"),
)
"""Keys that may name a file."""


class Experiment(Table):
    """What is run. Each setting has one owner; all but `method`, `fleet` and `stop` may be left out."""

    name: str = Field(default="experiment", min_length=1, max_length=MOST_LETTERS)
    """What the run is called; the file's name where not given."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """All chance derives from it."""
    method: MethodTable
    fleet: Fleet
    network: Network = Network()
    data: DataConfig = DataConfig()
    model: ModelConfig = Field(default_factory=ModelConfig)
    train: TrainConfig = TrainConfig()
    assign: AssignConfig = AssignConfig()
    compress: CompressConfig = CompressConfig()
    faults: FaultsTable = FaultsTable()
    evaluate: EvaluateTable = EvaluateTable()
    stop: Stop
    execution: Execution = Execution()

    @property
    def num_devices(self) -> int:
        return sum(self.fleet.devices.values())

    def decided(self) -> Experiment:
        """The same with what was left to edgefl decided: link model, executor and group."""
        network, execution = self.network, self.execution
        if network.link_model is None:
            model = "fair" if self.num_devices <= FAIR_UP_TO else "local-fair"
            network = network.model_copy(update={"link_model": model})
        if execution.executor == "auto":
            dense = self.model.name in _DENSE and self.data.name != "text"
            execution = execution.model_copy(update={"executor": "batched" if dense else "parallel"})
        if execution.executor == "batched" and execution.group is None:
            share = getattr(self.method.config, "client_fraction", 1.0)
            group = even_group(round(share * self.num_devices))
            execution = execution.model_copy(update={"group": group})
        return self.model_copy(update={"network": network, "execution": execution})

    def to_toml(self) -> str:
        """The resolved file: every setting of this run with its value; running it repeats the run."""
        table = self.decided().model_dump()
        own = self.method.config.model_dump()
        table["method"] = {"name": self.method.name, self.method.method.name: own}
        return write_toml(table)


def load_experiment(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    smoke: bool = False,
    seed: int | None = None,
    method: str | None = None,
) -> Experiment:
    """Read and check an experiment file, or the tables of one.

    source: the file's path, or its tables as a dictionary, of which paths are those of the working directory.
    overrides: "a.b.c=VALUE", VALUE as in TOML, a bare word is a string. smoke: lay the [smoke] tables
    over the others. seed, method: in place of the file's. A relative path in the file is looked for
    beside the file first, then in the working directory.
    Raises ConfigError, in one line that names the key, the value, and what would be accepted.
    """
    base, folder, default = _tables_of(source)
    overlay = base.pop("smoke", {})
    if not isinstance(overlay, dict):
        raise ConfigError("smoke", overlay, "a table of settings for quick runs")
    base.setdefault("name", default[:MOST_LETTERS])

    def resolved(tables: dict[str, Any]) -> Experiment:
        for text in overrides:
            _override(tables, text)
        if seed is not None:
            tables["seed"] = seed
        if method is not None:
            given = tables.get("method", {})
            tables["method"] = {**(given if isinstance(given, dict) else {}), "name": method}
        return parse_experiment(_anchored(tables, folder))

    quick = _overlaid(base, overlay)
    if smoke:
        return resolved(quick)
    experiment = resolved(base)
    if overlay:
        try:
            resolved(quick)
        except ConfigError as error:
            raise ConfigError(f"smoke.{error.key}", error.found, error.accepted) from error
    return experiment


def _tables_of(source: object) -> tuple[dict[str, Any], Path, str]:
    """The tables of a file or a dictionary, where its relative paths lead from, and what it is called."""
    if isinstance(source, Mapping):
        refuse_deep(source, "experiment", "a dictionary")
        return _copied(source), Path(), "experiment"
    if not isinstance(source, str | Path):
        raise ConfigError("experiment", source, "a file's path, or its tables as a dictionary")
    path = Path(source)
    return read_toml(path), path.parent, path.stem.encode(errors="replace").decode()


def parse_experiment(tables: Mapping[str, Any]) -> Experiment:
    """An experiment from the tables of a file. Raises ConfigError."""
    experiment = checked(Experiment, tables, "")
    if experiment.data.name not in SOURCES:
        raise ConfigError("data.name", experiment.data.name, nearest(experiment.data.name, SOURCES))
    for name in experiment.fleet.devices:
        device(name)
    device(experiment.fleet.roles.server, "fleet.roles.server")
    device(experiment.fleet.roles.edge, "fleet.roles.edge")
    return experiment


def _overlaid(
    base: Mapping[str, Any], overlay: Mapping[str, Any], place: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Tables merge key by key; other values, and tables of names, are replaced."""
    merged = _copied(base)
    for key, value in overlay.items():
        here = merged.get(key)
        if isinstance(here, dict) and isinstance(value, dict) and (*place, key) not in _NAMES_NOT_KEYS:
            merged[key] = _overlaid(here, value, (*place, key))
        else:
            merged[key] = _copied(value) if isinstance(value, dict) else value
    return merged


def _copied(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in table.items()}


def _override(tables: dict[str, Any], text: str) -> None:
    """Set one key of the tables to what "a.b.c=VALUE" says."""
    form = "KEY=VALUE, such as train.learning_rate=0.1"
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError("--set", text, form)
    try:
        text.encode()
        nested = tomllib.loads(f"{name} = 0")
        found = _value(value)
    except (ValueError, RecursionError) as error:  # no text, no key, a number of thousands of digits
        raise ConfigError("--set", text, form) from error
    refuse_deep([nested, [found]], "--set", text)
    here, word = tables, ""
    while True:
        ((word, nested),) = nested.items()
        if not isinstance(nested, dict):
            break
        inner = here.get(word, {})
        if isinstance(inner, str):  # a plain name that stands for a table
            inner = {"name": inner}
        if not isinstance(inner, dict):
            raise ConfigError("--set", text, f"{word} is a value, not a table")
        here[word] = inner
        here = inner
    here[word] = found
    if name.strip() in _INSTEAD:
        here.pop(_INSTEAD[name.strip()], None)


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text.strip()
    return parsed["x"] if len(parsed) == 1 else text.strip()


def _anchored(tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Relative paths that exist beside the experiment file, made absolute."""
    for section, key in _PATHS:
        _anchor(tables.get(section), key, folder)
    network, fleet = tables.get("network"), tables.get("fleet")
    if isinstance(network, dict):
        _anchor(network.get("topology"), "file", folder)
        for name in network["traces"] if isinstance(network.get("traces"), dict) else ():
            _anchor(network["traces"], name, folder)
    if isinstance(tables.get("faults"), dict):
        _anchor(tables["faults"].get("availability"), "file", folder)
    if isinstance(fleet, dict):
        for role in Roles.model_fields:
            _anchor(fleet.get("roles"), role, folder)
        if isinstance(fleet.get("devices"), dict):
            fleet["devices"] = {_beside(name, folder): count for name, count in fleet["devices"].items()}
    return tables


def _anchor(table: object, key: str, folder: Path) -> None:
    if isinstance(table, dict) and isinstance(table.get(key), str):
        table[key] = _beside(table[key], folder)


def _beside(text: str, folder: Path) -> str:
    looks_like_a_path = "/" in text or "." in text
    return str((folder / text).resolve()) if looks_like_a_path and (folder / text).exists() else text
