"""The lab: the links of an experiment, for real, on this machine."""

from __future__ import annotations

from typing import Any

import typer

from edgefl.commands.shared import FAILED, File, Json, MethodName, Set, Smoke, app, command_of, emit, show

lab = typer.Typer(
    help="Network namespaces of this machine, with the links of an experiment (needs root and iproute2).",
    no_args_is_help=True,
)
app.add_typer(lab, name="lab")


@command_of(lab)
def up(
    file: File,
    settings: Set = [],  # noqa: B006 (typer copies it)
    method: MethodName = None,
    smoke: Smoke = False,
    as_json: Json = False,
) -> None:
    """Make a namespace for each node of an experiment, on links as its [network] says."""
    from edgefl.experiment.build import build
    from edgefl.experiment.config import load_experiment
    from edgefl.lab.build import status as lab_status
    from edgefl.lab.build import up as make
    from edgefl.lab.system import require

    require()
    make(build(load_experiment(file, settings, smoke=smoke, method=method)).plan.network)
    _tell(lab_status(), as_json)


@command_of(lab)
def down(as_json: Json = False) -> None:
    """Take the lab down, with all that runs in it. Does no harm where nothing is up."""
    from edgefl.lab.build import down as remove

    removed = remove()
    if as_json:
        emit({"removed": removed})
    else:
        typer.echo("the lab is down" if removed else "no lab is up")


@command_of(lab)
def status(as_json: Json = False) -> None:
    """Show the lab that is up. Exit code 1 where none is."""
    from edgefl.lab.build import status as lab_status

    _tell(lab_status(), as_json)


def _tell(found: dict[str, Any] | None, as_json: bool) -> None:
    if as_json:
        emit(found or {"name": None})
    elif found is None:
        typer.echo("no lab is up")
    else:
        _show_lab(found)
    if found is None or found["missing"]:
        raise typer.Exit(FAILED)


def _show_lab(found: dict[str, Any]) -> None:
    from edgefl.console import table
    from edgefl.experiment.report.units import scaled, seconds, share

    cells = [
        (
            seat["node"],
            seat["namespace"],
            seat["address"],
            scaled(seat["up_bytes_per_s"], "B/s"),
            scaled(seat["down_bytes_per_s"], "B/s"),
            seconds(seat["latency_s"]),
            share(seat["loss"], 1),
            seat["processes"],
        )
        for seat in found["seats"]
    ]
    headers = ("node", "namespace", "serves at", "up", "down", "latency", "loss", "processes")
    show(table(headers, cells, right=(0, 3, 4, 5, 6, 7)))
    typer.echo(f"rates by tbf, delays by {found['delays']}; up since {found['since']}")
    if found["missing"]:
        typer.echo(
            f"gone, by other hands: {', '.join(found['missing'])}; edgefl lab down clears up", err=True
        )
