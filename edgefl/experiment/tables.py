"""The tables of an experiment file, but for [data], [model] and [train], which their rooms define."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from edgefl.errors import ConfigError, nearest
from edgefl.experiment.toml import checked
from edgefl.network import Access, LinkModel, TopologyConfig, parse_link, parse_rate
from edgefl.nodes import Method, MethodConfig
from edgefl.nodes.registry import find_method, methods

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
LINK_WORDS = frozenset({"like", "up", "down", "bandwidth", "snr_db", *Access.model_fields})
"""Keys of one link; a [network.link] table without any of them names links by device."""
RISING = frozenset({"accuracy", "return"})
"""Metrics of which more is better."""


class Table(BaseModel):
    """Base of the tables: frozen, unknown keys refused, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class MethodTable(BaseModel):
    """The [method] table, and [method.NAME] tables with what only that method has.

    A plain name stands for a table with that name alone. Tables of methods that are not run are
    checked too, so that one file serves a comparison.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    """A method's name (`edgefl methods` lists them), or the path of a .py file that defines METHOD."""

    @model_validator(mode="before")
    @classmethod
    def _plain_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _tables_fit(self) -> MethodTable:
        chosen = self.method
        for key, table in (self.model_extra or {}).items():
            if not isinstance(table, Mapping):
                raise ConfigError(
                    f"method.{key}", table, f"a method's settings go into [method.{chosen.name}]"
                )
            if key != chosen.name and key not in methods():
                raise ConfigError(f"method.{key}", dict(table), nearest(key, {chosen.name, *methods()}))
            checked((chosen if key == chosen.name else methods()[key]).config, table, f"method.{key}")
        return self

    @property
    def method(self) -> Method:
        return find_method(self.name)

    @property
    def config(self) -> MethodConfig:
        """The chosen method's own settings."""
        name = self.method.name
        return checked(self.method.config, (self.model_extra or {}).get(name, {}), f"method.{name}")


def _factors(value: dict[str, float] | None, key: str) -> dict[str, float] | None:
    """{share, slowdown}, or factors of at least 1 by node id. Raises ConfigError for anything else."""
    if value is None:
        return value
    if not value.keys() & {"share", "slowdown"} and all(word.isdecimal() for word in value):
        for node, factor in value.items():
            if factor < 1:
                raise ConfigError(f"{key}.{node}", factor, "a factor of at least 1")
        return value
    for word in sorted(value.keys() - {"share", "slowdown"}):
        raise ConfigError(f"{key}.{word}", value[word], "either share and slowdown, or node ids with factors")
    if not 0 < value.get("share", 0) <= 1:
        raise ConfigError(f"{key}.share", value.get("share"), "a share in (0, 1]")
    if value.get("slowdown", 0) < 1:
        raise ConfigError(f"{key}.slowdown", value.get("slowdown"), "a factor of at least 1")
    return value


class Roles(Table):
    """The [fleet.roles] table: devices of roles that are not the fleet's."""

    server: str = "laptop"
    """The server's device, for methods that have one; it is node 0, and holds no data."""
    edge: str = "laptop"
    """The device of each edge, for methods with a tier between server and devices; they hold no data."""
    generator: str = "laptop"
    """The device of the node that forms groups, for methods that have one; it holds no data."""


class Background(Table):
    """Other programs on the devices: on and off in turn, for times drawn from exponential distributions."""

    load: Annotated[float, Field(gt=0, lt=1)]
    """The share of the processor that they take while they are on."""
    mean_on_s: Positive
    mean_off_s: Positive


class ThermalTable(Table):
    """Devices without a fan: work that goes on and on makes them slower."""

    after_s: Positive = 60.0
    """Seconds of work on end until a cool processor throttles."""
    recover_s: Positive = 120.0
    """Seconds of rest that cool it from there to where it began; half of it ends the throttling."""
    slowdown: Annotated[float, Field(ge=1)] = 1.5
    """How many times longer work takes while it throttles."""


class Battery(Table):
    """What feeds each device; one that runs flat ends the node's life."""

    capacity_wh: Positive
    """Watt-hours when full."""
    level: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How full it is at the start."""


class Fleet(Table):
    """The [fleet] table: who takes part."""

    devices: dict[str, Annotated[int, Field(ge=1)]] = Field(min_length=1)
    """How many of each, by catalog name (`edgefl devices` lists them) or .toml profile; ids in this order."""
    roles: Roles = Roles()
    stragglers: dict[str, Positive] | None = None
    """{share, slowdown}: that share of the devices, drawn from the seed, takes `slowdown` times longer for
    all work; or {"3" = 5.0}: factors by node id."""
    background: Background | None = None
    """Other programs on every device, drawn from the seed. Virtual time."""
    thermal: ThermalTable | None = None
    """Every device throttles after sustained work. Virtual time."""
    battery: Battery | None = None
    """Every device lives on a battery. Virtual time."""

    @field_validator("stragglers")
    @classmethod
    def _of_one_form(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        return _factors(value, "fleet.stragglers")


class Cap(Table):
    """A limit on one pair's flows."""

    sender: int
    receiver: int
    rate: str | Positive
    """Most bytes per second of one flow, or text such as "2 Mbit/s"."""


class DrawnTrace(Table):
    """Good and bad times in turn, drawn for each device from exponential distributions."""

    low: Annotated[float, Field(gt=0, lt=1)]
    """The share of its rates that a link keeps in bad times."""
    mean_high_s: Positive
    mean_low_s: Positive


class Network(Table):
    """The [network] table: who talks to whom, over what."""

    topology: TopologyConfig | None = None
    """Graph of methods that work on any connected one, and of those that need a bipartite one; star and
    complete methods have their own. Where not given: a ring, or the complete bipartite graph."""
    mixing: str = "metropolis"
    """W of methods that mix by one: metropolis, uniform, or a .csv or .npy file."""
    link: str | dict[str, Any] = "home"
    """How devices are connected: the name of a link class; or one link, {up = "2 Mbit/s", down = ...,
    latency = "20 ms"}, or a wireless one, {bandwidth = "5 MHz", snr_db = 20}; or any of these by device name,
    with the words of [fleet.roles] (fibre where not given) and `default` (home) among the names."""
    link_model: LinkModel | None = None
    """How flows share links: fair (max-min; the default up to 300 nodes), local-fair, or fifo."""
    stragglers: dict[str, Positive] | None = None
    """Thin uplinks: {share, slowdown}: that share of the devices, the same ones that [fleet] stragglers draws
    first, sends so many times slower; or {"3" = 5.0}: factors by node id."""
    traces: dict[str, str | DrawnTrace] = {}
    """How rates change, by device name or `default`: a CSV file of time_s,value, the share of the link's
    rates from that time on; or {low, mean_high_s, mean_low_s}, drawn from the seed. Virtual time."""
    segments: dict[str, str | Positive] = {}
    """Rate of each shared segment that links name, bytes per second or text such as "54 Mbit/s"."""
    path: str | Positive | None = None
    """Most that one flow between any two nodes gets, bytes per second or text such as "2 Mbit/s"."""
    caps: tuple[Cap, ...] = ()
    """Limits of pairs, in its place."""
    probe: bool = True
    """Over several machines or in the lab: each process measures its way to the lead when it joins, in about
    a second."""

    @field_validator("stragglers")
    @classmethod
    def _of_one_form(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        return _factors(value, "network.stragglers")

    @field_validator("topology", mode="before")
    @classmethod
    def _plain_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return (
            {"name": "file", "file": value}
            if value.endswith((".txt", ".edges", ".json"))
            else {"name": value}
        )

    @model_validator(mode="after")
    def _links_read(self) -> Network:
        for name, one in self.links.items():
            access = parse_link(one, "network.link" if self.one_link else f"network.link.{name}")
            if access.segment is not None and access.segment not in self.segments:
                raise ConfigError(
                    "network.segments", access.segment, "a rate for each segment that a link names"
                )
        for name, rate in self.segments.items():
            bytes_per_s(rate, f"network.segments.{name}")
        if self.path is not None:
            bytes_per_s(self.path, "network.path")
        for cap in self.caps:
            bytes_per_s(cap.rate, "network.caps")
        return self

    @property
    def one_link(self) -> bool:
        """Whether `link` is one for all devices."""
        return isinstance(self.link, str) or bool(LINK_WORDS & self.link.keys())

    @property
    def links(self) -> dict[str, Any]:
        """Links as written, by device name, "default", and the roles beside the devices."""
        standard = {"default": "home", **dict.fromkeys(Roles.model_fields, "fibre")}
        if isinstance(self.link, str) or self.one_link:
            return {**standard, "default": self.link}
        return {**standard, **self.link}


class CrashTable(Table):
    """One crash."""

    node: int = Field(ge=0)
    at_s: NotNegative
    down_s: Positive | None = None
    """Seconds until it returns; never where not given."""


class PartitionTable(Table):
    """One time in which nothing passes between `nodes` and the rest."""

    nodes: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    at_s: NotNegative
    for_s: Positive


class Churn(Table):
    """Devices that come and go: times up and down are drawn from exponential distributions."""

    mean_up_s: Positive
    mean_down_s: Positive
    until_s: Positive | None = None
    """No crash later than that; stop.time_s where not given."""


class Availability(Table):
    """When devices are there: by the time of day, or as a file says."""

    period_s: Positive | None = None
    """diurnal: seconds of a day; each device's begins at a time of its own, drawn from the seed."""
    up_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """diurnal: the share of a day in which a device is there, on end."""
    until_s: Positive | None = None
    """diurnal: no departure later than that; stop.time_s where not given."""
    file: str | None = None
    """A CSV file of time_s,node,up: at that time the node comes (1) or goes (0); there at first."""

    @model_validator(mode="after")
    def _one_form(self) -> Availability:
        diurnal = (self.period_s, self.up_share)
        if (self.file is None) == (diurnal == (None, None)) or (self.file is None and None in diurnal):
            raise ConfigError("faults.availability", None, "either period_s and up_share, or file")
        return self


class PoisonTable(Table):
    """Hostile devices: that share of the fleet, drawn from the seed."""

    share: Annotated[float, Field(ge=0, le=1)]
    kind: Literal["label-flip", "sign-flip", "noise", "nan"] = "sign-flip"
    """label-flip: they train on labels c turned into C - 1 - c; sign-flip: what they change goes `scale`
    times as far, the other way; noise: their change is noise of deviation `scale`; nan: it is no number."""
    scale: Positive = 1.0


class FaultsTable(Table):
    """The [faults] table: what goes wrong. Drawn from the seed: a failure found once is found again."""

    crashes: tuple[CrashTable, ...] = ()
    partitions: tuple[PartitionTable, ...] = ()
    churn: Churn | None = None
    availability: Availability | None = None
    poison: PoisonTable | None = None
    detect_s: NotNegative = 1.0
    """Seconds from a crash until the others hear of it."""
    compute_jitter: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Standard deviation of a log-normal factor of mean 1 on the time of each work item."""


class EvaluateTable(Table):
    """The [evaluate] table: when models that programs publish are tried on the test set. Never charged."""

    every_s: Positive | None = None
    """Seconds between evaluations."""
    every_rounds: Annotated[int, Field(ge=1)] | None = None
    """Rounds (steps that programs publish) between evaluations; 1 where neither key is given."""
    max_nodes: Annotated[int, Field(ge=1)] | None = None
    """Where each node has a model of its own: evaluate so many of them, drawn from the seed."""


class Target(Table):
    """What a run should reach."""

    metric: Literal["accuracy", "loss", "rmse", "perplexity", "return", "regret"] | None = None
    """The task's first metric where not given."""
    value: float
    stop: bool = True
    """Whether reaching it ends the run."""

    @model_validator(mode="after")
    def _possible(self) -> Target:
        if self.metric is not None:
            self.check(self.metric)
        return self

    def check(self, metric: str) -> None:
        """Refuse a value that this metric cannot take."""
        if metric == "accuracy" and not 0 < self.value <= 1:
            raise ConfigError("stop.target.value", self.value, "an accuracy in (0, 1]")
        if metric in ("loss", "rmse", "perplexity") and self.value <= 0:
            raise ConfigError("stop.target.value", self.value, f"a {metric} above 0")

    def reached(self, metric: str, value: float) -> bool:
        return value >= self.value if metric in RISING else value <= self.value


class Stop(Table):
    """The [stop] table: where a run ends, whichever comes first."""

    rounds: Annotated[int, Field(ge=1)] | None = None
    """Rounds, or local steps of methods without rounds."""
    time_s: Positive | None = None
    """Seconds on the run's clock."""
    target: Target | None = None

    @model_validator(mode="after")
    def _bounded(self) -> Stop:
        if self.rounds is None and self.time_s is None and not (self.target and self.target.stop):
            raise ConfigError("stop", None, "at least one of rounds, time_s and a target that stops")
        return self


class Execution(Table):
    """The [execution] table: how the work is carried out here."""

    executor: Literal["auto", "inline", "batched", "parallel"] = "auto"
    """inline: item after item; batched: many nodes' steps of a dense model as one; parallel: items side by
    side; auto: the fastest."""
    group: Annotated[int, Field(ge=1)] | None = None
    """batched: most items in one step."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """batched, parallel: threads; as many as there are cores where not given. No result depends on it."""
    device: Literal["cpu", "cuda"] = "cpu"
    checkpoint_s: Positive | None = None
    """Virtual: wall-clock seconds between checkpoints, from which --resume goes on; without them it repeats
    the run from its seed. They need memory for what programs did since they last saved."""
    emulate: bool = False
    """Over gRPC: make this machine as slow as the profiles and links say."""


def bytes_per_s(rate: str | float, key: str) -> float:
    """A rate as a number of bytes per second, or as text with a unit."""
    return parse_rate(rate, key) if isinstance(rate, str) else rate
