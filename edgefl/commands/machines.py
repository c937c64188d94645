"""Commands on methods, devices and machines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.commands.shared import FAILED, Json, Quiet, command, emit, errors, show, silent
from edgefl.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.table import Table

Figures = list[dict[str, Any]]


@command
def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show this method and its settings.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods: family, roles, paper, runtimes; or show one with its settings."""
    from edgefl.experiment.runner import RUNTIMES
    from edgefl.experiment.settings import settings
    from edgefl.nodes.registry import find_method
    from edgefl.nodes.registry import methods as registered

    chosen = list(registered().values()) if name is None else [find_method(name)]
    rows = [
        {"name": m.name, "family": m.family, "title": m.title, "roles": list(m.roles), "needs": m.needs,
         "paper": m.paper, "runtimes": list(RUNTIMES)}
        for m in chosen
    ]  # fmt: skip
    keys = [vars(one) for one in settings(chosen[0].config)] if name is not None else []
    if as_json:
        emit(*rows if name is None else [rows[0] | {"settings": keys}])
        return
    from edgefl.console import table

    if name is not None:
        show(table(("", ""), [(key, _words(value)) for key, value in rows[0].items()]))
        heads = (f"[method.{chosen[0].name}]", "takes", "default", "what it does")
        show(table(heads, [tuple(key.values()) for key in keys]))
        return
    cells = [
        (r["name"], r["family"], ", ".join(r["roles"]), ", ".join(r["runtimes"]), r["paper"]) for r in rows
    ]
    show(table(("method", "family", "roles", "runtimes", "paper"), cells))


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


Entry = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Show this one, with the sources of its figures.")
]


@command
def devices(name: Entry = None, as_json: Json = False) -> None:
    """List the devices of the catalog with their figures; or show one, with where they come from."""
    from edgefl.console import device_table
    from edgefl.devices import catalog, device

    found = _told(catalog().values() if name is None else [device(name, "NAME")], name, device_table, as_json)
    if name is not None and not as_json:
        typer.echo(found[0]["source"])


@command
def links(name: Entry = None, as_json: Json = False) -> None:
    """List the classes of access links with their figures; or show one, with where they come from."""
    from edgefl.console import link_table
    from edgefl.network.links import link
    from edgefl.network.links import links as catalog

    _told(catalog().values() if name is None else [link(name, "NAME")], name, link_table, as_json)


def _told(
    entries: Iterable[BaseModel], name: str | None, as_table: Callable[[Figures], Table], as_json: bool
) -> Figures:
    """Print a catalog's entries; of one that is named also the sources. Returns their figures."""
    found = [entry.model_dump() for entry in entries]
    if as_json:
        emit(*found)
        return found
    from edgefl.console import source_table

    show(as_table(found))
    if name is not None:
        show(source_table(found[0]["sources"]))
    return found


@command
def profile(
    out: Annotated[
        Path | None, typer.Option(help="The profile to write, .toml or .json; default: none.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Time this model's steps too, by its name.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats: some 15 seconds.")] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine, in at most a minute, as a profile that `fleet.devices` can name."""
    if out is not None and out.suffix not in (".toml", ".json"):
        raise ConfigError("--out", str(out), "a file that ends with .toml or .json")
    from edgefl.experiment import profiling
    from edgefl.planview import ProfileBar

    named = None if model is None else profiling.profiled_model(model)
    folder = Path() if out is None else out.parent
    if not folder.is_dir():
        raise ConfigError("--out", str(out), f"a file in a folder that exists; {folder} does not")
    with ProfileBar(None if silent(as_json, False) else errors()) as bar:
        found = profiling.measure_machine(
            name=None if out is None else out.stem, model=named, quick=quick, told=bar.told, folder=folder
        )
    if out is not None:
        profiling.write_profile(found, out)
    if as_json:
        emit(found.model_dump())
    else:
        from edgefl.console import table

        show(table(("figure", "measured"), profiling.table_rows(found)))
        if out is not None:
            typer.echo(f"profile: {out}")
    for doubt in found.machine["doubts"]:
        typer.echo(f"edgefl: do not trust these figures: {doubt}", err=True)


@command
def node(
    fleet: Annotated[Path, typer.Option(help="The fleet's file: who is where.", show_default=False)],
    number: Annotated[int, typer.Option("--id", help="Which of its nodes this is.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Of node 0: the folder to write; default: runs/RUN_ID.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it keeps what it needs to go on after a crash.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve here; default: its address in the file.")
    ] = None,
    grace: Annotated[float, typer.Option(min=0.1, help="Seconds after which one that is away is gone.")] = 30,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Start the process that hosts one node of a fleet, over gRPC; the one with node 0 leads the run."""
    import logging

    from edgefl.console import RunView, run_table
    from edgefl.experiment.local import run_node
    from edgefl.experiment.orphans import end_with_parent

    end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    view = None if silent(as_json, quiet) or not sys.stderr.isatty() else RunView(errors())
    result = run_node(fleet, number, out=out, state=state, listen=listen, grace_s=grace, progress=view)
    if result is None:
        return
    if as_json:
        emit(result.summary)
        return
    show(run_table(result.summary))
    typer.echo(f"report: {result.folder / 'report.html'}")


@command
def doctor(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(metavar="HOST:PORT...", help="Addresses to reach.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine: Python, native modules, memory, disk, folders, extras, and addresses."""
    from edgefl.doctor import examine

    found = []
    for finding in examine(addresses or []):
        found.append(finding)
        if as_json:
            emit(finding.as_dict())
        else:
            advice = f" -> {finding.advice}" if finding.advice else ""
            typer.echo(f"{finding.state:>4}  {finding.check}: {finding.found}{advice}")
    if any(finding.state == "fail" for finding in found):
        raise typer.Exit(FAILED)
