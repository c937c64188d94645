"""Writes the reference pages that follow from the code: experiment file, commands, devices and links.

A hook of mkdocs.yml: the pages are made when the site is built. Those to which others link have a placeholder
in docs/reference/, for readers of the repository. What they say is said in the docstrings of the code; notes
on a method are in docs/method-notes/NAME.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

import typer
from pydantic import BaseModel

from edgefl.cli import EXIT_CODES, app
from edgefl.devices import DeviceProfile, catalog
from edgefl.experiment.config import Experiment
from edgefl.experiment.settings import NEEDED, is_table, settings
from edgefl.learning.models import MODELS
from edgefl.network import Access
from edgefl.network.links import links
from edgefl.nodes import Method
from edgefl.nodes.registry import methods

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

HERE = Path(__file__).resolve().parent


def pages() -> dict[str, str]:
    """The text of each page, by its path below docs/."""
    made = {
        "experiment-file.md": experiment_page(),
        "commands.md": commands_page(),
        "devices-and-links.md": devices_page(),
        "methods/index.md": methods_page(),
    }
    made |= {f"methods/{m.name}.md": method_page(m) for m in methods().values()}
    return {f"reference/{name}": text for name, text in made.items()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs: add the pages to those of docs/, in place of their placeholders."""
    from mkdocs.structure.files import File

    for name, text in pages().items():
        placeholder = files.get_file_from_path(name)
        if placeholder is not None:
            files.remove(placeholder)
        files.append(File.generated(config, name, content=text))
    return files


# --- the experiment file -------------------------------------------------------------------------------


def experiment_page() -> str:
    intro = """
        # The experiment file

        One TOML file says what is run. Unknown keys, impossible combinations and values out of range are
        refused before anything starts, in one line that names the key, the value, and what would be
        accepted. Any key can be set on the command line too: `--set train.learning_rate=0.05`. All tables
        but `[method]`, `[fleet]` and `[stop]` may be left out.

        `[smoke]` holds any of these tables again; `--smoke` lays them over the others, for quick runs. A
        relative path is looked for beside the file first, then in the working directory.

        A link, in `[network]`, is the name of a link class ([devices and links](devices-and-links.md)) or
        a table: `up` and `down` (`"2 Mbit/s"`), `latency` (`"20 ms"`), `jitter`, `loss`, `segment`, and
        `like`, a class that fills in the rest.
    """
    parts = [textwrap.dedent(intro).strip(), ""]
    parts += [section(title, kind) for title, kind in file_tables(Experiment)]
    return "\n".join(parts)


def file_tables(kind: type[BaseModel], place: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every table that the file may hold, with its title: tables within a table follow it."""
    yield f"[{place}]" if place else "Top of the file", kind
    if place == "method":
        yield from ((f"[method.{m.name}]", m.config) for m in methods().values() if m.config.model_fields)
    if place == "model":
        yield from ((f'[model] with name = "{name}"', options) for name, options in MODELS.items())
    for key, field in kind.model_fields.items():
        inner, name = table_in(field.annotation), f"{place}.{key}".lstrip(".")
        if inner is not None and get_origin(field.annotation) is tuple:
            yield f"{name}, each", inner
        elif inner is not None:
            yield from file_tables(inner, name)


def table_in(annotation: Any) -> type[BaseModel] | None:
    """The table class in an annotation such as `tuple[Cap, ...]` or `Target | None`."""
    if is_table(annotation):
        return annotation  # type: ignore[no-any-return]
    found = (table_in(inner) for inner in get_args(annotation))
    return next((kind for kind in found if kind is not None), None)


def section(title: str, kind: type[BaseModel]) -> str:
    """One table of the file: what its class says, and a row per key."""
    lines = [f"## {title}", "", " ".join((inspect.getdoc(kind) or "").split()), ""]
    if not kind.model_fields:
        return "\n".join([*lines, "It has no keys of its own.", ""])
    rows = [(f"`{s.key}`", s.takes, _default(s.default), s.what) for s in settings(kind)]
    return "\n".join([*lines, *markdown_table(("key", "value", "default", "what it does"), rows), ""])


def _default(value: str) -> str:
    return value if value in ("", NEEDED) else f"`{value}`"


# --- methods ---------------------------------------------------------------------------------------------


METHODS = """
    # Methods

    `edgefl methods` lists what is installed. A method file of your own is named by its path. The pages say
    what is faithful to the paper, what was chosen where it leaves room, what it costs, where its limits are,
    and how it behaves when things go wrong.

    Costs are in messages and model sizes: P parameters, 4 bytes each, n nodes. "Crashes" are nodes that never
    come back, "returns" nodes that crash and come back, "partitions" times in which nothing passes between
    two parts of the fleet, "delays" late nodes and messages, "silence" nodes that stop answering and are not
    reported dead.
"""
GRAPHS = {
    "star": "star, the server in the middle",
    "complete": "everybody to everybody",
    "bipartite": "bipartite",
    "connected": "any connected one",
    "any": "none asked for",
}
MODELS_THAT_COUNT = {
    "server": "the server's",
    "each": "each node's own, means over nodes",
    "mean": "the mean of the nodes'",
    "parts": "the parts that nodes hold, joined",
    "personal": "each client's part with the server's",
}


def methods_page() -> str:
    rows = [
        (f"[{m.name}]({m.name}.md)", m.title, m.family, GRAPHS[m.needs], outlives(m))
        for m in methods().values()
    ]
    heads = ("method", "what it is", "family", "graph", "outlives")
    return "\n".join([textwrap.dedent(METHODS).strip(), "", *markdown_table(heads, rows), ""])


def method_page(method: Method) -> str:
    """What a method declares, the notes on it (docs/method-notes), its settings, and its file's own words."""
    module = inspect.getmodule(next(iter(method.roles.values())))
    own = sys.modules[f"edgefl.methods.{method.family}.{method.name.replace('-', '_')}"]
    assert module is not None and own.__doc__ is not None
    facts = [
        ("paper", f"{method.paper.rpartition(', ')[0]}, <{method.paper.rpartition(', ')[2]}>"),
        ("code", f"`edgefl/methods/{method.family}/{own.__name__.rpartition('.')[2]}.py`"),
        ("roles", ", ".join(method.roles)),
        ("graph", GRAPHS[method.needs]),
        ("whose model counts", MODELS_THAT_COUNT[method.evaluates]),
        ("outlives", outlives(method)),
    ]
    notes = HERE / "method-notes" / f"{method.name}.md"
    lines = [f"# {method.name}", "", f"{method.title}.", "", *markdown_table(("", ""), facts), ""]
    lines += [notes.read_text(encoding="utf-8")] if notes.exists() else []
    lines += [section("Settings", method.config), "## In its file's words", ""]
    return "\n".join([*lines, "```text", own.__doc__.strip(), "```", ""])


def outlives(method: Method) -> str:
    """The faults that a method says it outlives."""
    faults = method.tolerates
    found = [fault.name for fault in dataclasses.fields(faults) if getattr(faults, fault.name)]
    return ", ".join(found) or "none"


# --- the commands --------------------------------------------------------------------------------------


def commands_page() -> str:
    lines = ["# Commands", "", str(app.info.help), "", EXIT_CODES, ""]
    lines += ["A run that fails says why in one line. `edgefl --debug COMMAND ...` adds the traceback.", ""]
    for name, function in commands():
        lines += [f"## edgefl {name}", "", inspect.getdoc(function) or "", ""]
        signature = inspect.signature(function, eval_str=True)
        rows = [parameter(one) for one in signature.parameters.values()]
        lines += [*markdown_table(("argument or option", "what it does"), rows), ""]
    return "\n".join(lines)


def commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command by its name, those of groups after the others."""
    groups = [("", app), *((f"{group.name} ", group.typer_instance) for group in app.registered_groups)]
    for before, group in groups:
        for command in group.registered_commands:
            assert command.callback is not None
            yield before + command.callback.__name__, command.callback


def parameter(one: inspect.Parameter) -> tuple[str, str]:
    """How an argument or option is written, and what it does."""
    kind, info = get_args(one.annotation)
    if isinstance(info, typer.models.ArgumentInfo):
        return f"`{info.metavar}`", info.help or ""
    declared = [d for d in (info.default, *(info.param_decls or ())) if str(d).startswith("--")]
    decl = declared[0] if declared else "--" + one.name.replace("_", "-")
    takes = "" if kind is bool else f" {info.metavar or one.name.upper()}"
    return f"`{decl}{takes}`", info.help or ""


# --- devices and links ---------------------------------------------------------------------------------


def devices_page() -> str:
    devices = [
        (f"`{d.name}`", d.title, f"{d.compute_flops / 1e9:g}", f"{d.memory_bytes_per_s / 1e9:g}",
         f"{d.memory_bytes / 1e9:g}", f"{d.step_overhead_s * 1e3:g}", watts(d), d.source)
        for d in catalog().values()
    ]  # fmt: skip
    classes = [
        (f"`{a.name}`", mbit(a.up_bytes_per_s), mbit(a.down_bytes_per_s), f"{a.latency_s * 1e3:g}",
         f"{a.jitter:g}", f"{a.loss:g}", a.source)
        for a in links().values()
    ]  # fmt: skip
    lines = [
        "# Devices and links",
        "",
        "Figures are sustained rates in training, not peaks, and most are derived from published ones: the "
        "last column says how, and [what they rest on](#what-the-figures-of-devices-rest-on) where it can be "
        "read. Where you have a board, [measure it](../how-to/device-profile.md).",
        "",
        "## Devices",
        "",
        *markdown_table(
            (
                "name",
                "device",
                "GFLOP/s",
                "memory GB/s",
                "memory GB",
                "ms per step",
                "W idle / busy",
                "source",
            ),
            devices,
        ),
        "",
        "## What the figures of devices rest on",
        "",
        *source_lines(catalog()),
        "",
        section("A device profile", DeviceProfile),
        "## Link classes",
        "",
        "Rates are what one node has to itself. Latency is one way, from the node to the backbone: that of a "
        "pair is the sum of its two ends'.",
        "",
        *markdown_table(
            ("name", "Mbit/s up", "Mbit/s down", "latency ms", "jitter", "loss", "source"), classes
        ),
        "",
        "## What the figures of links rest on",
        "",
        *source_lines(links()),
        "",
        section("A link", Access),
    ]
    return "\n".join(lines)


def source_lines(entries: Mapping[str, DeviceProfile] | Mapping[str, Access]) -> Iterator[str]:
    """A list of a catalog's sources, entry by entry."""
    yield "*Not verified*: cited as its publisher names it, but nobody has read it for this catalog."
    for name, entry in entries.items():
        yield ""
        yield f"`{name}`"
        yield ""
        for source in entry.sources:
            figures = ", ".join(f"`{figure}`" for figure in source.figures)
            doubt = "" if source.verified or source.url is None else " (*not verified*)"
            where = "" if source.url is None else f": <{source.url}>"
            yield f"- {figures}: {source.says}{doubt}{where}"


def watts(device: DeviceProfile) -> str:
    return "" if device.idle_w is None or device.busy_w is None else f"{device.idle_w:g} / {device.busy_w:g}"


def mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:g}"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|" + " --- |" * len(heads)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
