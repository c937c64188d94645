"""Commands on experiments and on what they left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.commands.shared import (
    FAILED,
    File,
    Jobs,
    Json,
    MethodName,
    NumSeeds,
    Out,
    Quiet,
    Seeds,
    Set,
    Smoke,
    command,
    emit,
    errors,
    show,
    silent,
)
from edgefl.errors import ConfigError, nearest

if TYPE_CHECKING:
    from edgefl.experiment.comparison import Comparison
    from edgefl.experiment.hosts import Housing


@command
def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The experiment file (TOML).", show_default=False)
    ] = None,
    settings: Set = [],  # noqa: B006 (typer copies it)
    method: MethodName = None,
    runtime: Annotated[str, typer.Option(help="virtual (simulated time) or local (real gRPC).")] = "virtual",
    processes: Annotated[bool, typer.Option("--processes", help="local: a process per node.")] = False,
    lab: Annotated[
        bool,
        typer.Option("--lab", help="local: a process per node, on the file's links, shaped for real (root)."),
    ] = False,
    out: Out = None,
    seed: Annotated[int | None, typer.Option(help="A seed in place of the file's.")] = None,
    smoke: Smoke = False,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with an interrupted run.")] = None,
    executor: Annotated[
        str | None, typer.Option(help="How work is carried out, in place of the file's execution.executor.")
    ] = None,
    predict: Annotated[
        bool, typer.Option(help="local: put what virtual time predicts beside what is measured.")
    ] = True,
    profile_run: Annotated[
        bool, typer.Option("--profile-run", help="virtual: say where the testbed's own time went.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment; leaves a folder with its records, model and report."""
    from edgefl.console import RunView, run_table
    from edgefl.experiment import runner
    from edgefl.experiment.config import load_experiment

    view = None if silent(as_json, quiet) else RunView(errors())
    if resume is not None:
        if file is not None or settings or method or out or smoke or executor or seed is not None:
            raise ConfigError("--resume", str(resume), "alone: a run goes on as its folder says")
        result = runner.resume(resume, progress=view)
    elif file is None:
        raise ConfigError("FILE", None, "an experiment file, or --resume DIR")
    else:
        settings = settings if executor is None else [*settings, f"execution.executor={executor}"]
        experiment = load_experiment(file, settings, smoke=smoke, seed=seed, method=method)
        if profile_run and runtime != "virtual":
            raise ConfigError("--profile-run", True, "it goes with --runtime virtual")
        result = runner.run_experiment(
            experiment, runtime=runtime, out=out, progress=view, processes=processes,
            housing=_laboratory() if lab else None, profiled=profile_run, predict=predict,
        )  # fmt: skip
    if as_json:
        emit(result.summary)
        return
    show(run_table(result.summary))
    if profile_run and resume is None:
        from edgefl.experiment import profile

        text = (result.folder / profile.FILE).read_text(encoding="utf-8")
        typer.echo(profile.in_words(json.loads(text)))
    typer.echo(f"report: {result.folder / 'report.html'}")


def _laboratory() -> Housing:
    from edgefl.lab.hosts import lab_hosts

    return lab_hosts


@command
def compare(
    file: File,
    methods: Annotated[
        str, typer.Option(metavar="A,B,C", help="Methods by name or .py file.", show_default=False)
    ],
    seeds: Seeds = None,
    num_seeds: NumSeeds = None,
    settings: Set = [],  # noqa: B006
    jobs: Jobs = None,
    out: Out = None,
    smoke: Smoke = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods on one experiment, over seeds, in parallel. With --out, goes on where it stopped."""
    from edgefl.console import BatchView
    from edgefl.experiment.compare import compare as compare_methods

    names = [name.strip() for name in methods.split(",") if name.strip()]
    view = None if silent(as_json, quiet) else BatchView(errors())
    comparison = compare_methods(
        file, names, _seeds(seeds, num_seeds), jobs, out, overrides=settings, smoke=smoke, progress=view
    )
    _conclude(comparison, as_json)


@command
def sweep(
    file: File,
    grid: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=A,B", help="Values of one setting; repeatable: all combinations.", show_default=False
        ),
    ],
    seeds: Seeds = None,
    num_seeds: NumSeeds = None,
    method: MethodName = None,
    settings: Set = [],  # noqa: B006
    jobs: Jobs = None,
    out: Out = None,
    smoke: Smoke = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment at every point of a grid of settings, over seeds, in parallel."""
    from edgefl.console import BatchView
    from edgefl.experiment.sweep import parse_grid
    from edgefl.experiment.sweep import sweep as sweep_grid

    view = None if silent(as_json, quiet) else BatchView(errors())
    comparison = sweep_grid(
        file, parse_grid(grid), _seeds(seeds, num_seeds), jobs, out,
        overrides=settings, smoke=smoke, method=method, progress=view,
    )  # fmt: skip
    _conclude(comparison, as_json)


@command
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Runs, or one comparison.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Of several runs: the file to write.")] = Path("comparison.html"),
) -> None:
    """Write the report of a run or a comparison anew, or one that compares several runs."""
    from edgefl.experiment.comparison import FILE, load_comparison
    from edgefl.experiment.report import write_comparison, write_report

    if len(folders) == 1 and (folders[0] / FILE).is_file():
        comparison = load_comparison(folders[0])
        comparison.write()
        written = comparison.write_report()
    else:
        for folder in folders:
            if not (folder / "run.json").is_file():
                raise ConfigError(
                    "DIR", str(folder), "the folder of a run (with run.json) or of a comparison"
                )
        written = write_report(folders[0]) if len(folders) == 1 else write_comparison(folders, out)
    typer.echo(f"report: {written}")


@command
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.", show_default=False)],
    form: Annotated[str, typer.Option("--format", help="trace: a timeline for Perfetto.")] = "trace",
) -> None:
    """Write a run's records in another format."""
    from edgefl.experiment.trace import write_trace

    if form != "trace":
        raise ConfigError("--format", form, nearest(form, ["trace"]))
    if not (folder / "run.json").is_file():
        raise ConfigError("DIR", str(folder), "the folder of a run (with run.json)")
    typer.echo(f"trace: {write_trace(folder)} (open it at ui.perfetto.dev or chrome://tracing)")


@command
def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="METHOD|FILE",
            help="A method's name, a .py file that defines METHOD, or an experiment file (TOML).",
            show_default=False,
        ),
    ],
    num_seeds: Annotated[int, typer.Option("--seeds", metavar="N", min=1, help="The seeds 0 to N-1.")] = 200,
    seed: Annotated[int | None, typer.Option(min=0, help="One seed: meet a failure again.")] = None,
    settings: Set = [],  # noqa: B006
    smoke: Smoke = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a method under schedules of faults, drawn from seeds within what it says that it outlives.

    Ends at the first seed that hangs, diverges, fails or breaks an invariant, with
    the shortest schedule that still does, and the command that meets it again.
    """
    from edgefl.console import CheckView, check_lines
    from edgefl.experiment.check import Laboratory
    from edgefl.experiment.check import check as check_method

    laboratory = Laboratory(target, settings, smoke=smoke)
    view = None if silent(as_json, quiet) else CheckView(errors())
    found = check_method(laboratory, range(num_seeds) if seed is None else [seed], view)
    if as_json:
        emit(*(laboratory.as_dict(trial) for trial in found.trials))
        if found.finding is not None:
            emit({"shortest": laboratory.as_dict(found.finding.shortest), "replay": found.finding.replay})
    else:
        for line in check_lines(laboratory, found):
            typer.echo(line)
    if found.finding is not None:
        raise typer.Exit(FAILED)


@command
def plan(
    file: File,
    settings: Set = [],  # noqa: B006
    method: MethodName = None,
    seed: Annotated[int | None, typer.Option(help="A seed in place of the file's.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to go through.")] = 20,
    smoke: Smoke = False,
    as_json: Json = False,
) -> None:
    """Show who will do how much, how long a round takes and who waits, without any training."""
    from edgefl.experiment.config import load_experiment
    from edgefl.experiment.preview import preview

    found = preview(load_experiment(file, settings, smoke=smoke, seed=seed, method=method), rounds)
    if as_json:
        emit(found.as_dict())
        return
    from edgefl.planview import plan_table, timeline

    show(plan_table(found))
    for line in (*found.lines, *timeline(found)):
        typer.echo(line)


def _seeds(listed: str | None, count: int | None) -> list[int]:
    if count is not None:
        if listed is not None or count < 1:
            raise ConfigError("--num-seeds", count, "at least 1, and not together with --seeds")
        return list(range(count))
    try:
        return [int(word) for word in listed.split(",")] if listed is not None else []
    except ValueError as error:
        raise ConfigError("--seeds", listed, "whole numbers with commas between, such as 0,1,2") from error


def _conclude(comparison: Comparison, as_json: bool) -> None:
    """Print what a comparison found; exit code 1 when a run of it failed."""
    if as_json:
        emit(*comparison.lines)
    else:
        from edgefl.console import comparison_table

        word = "method" if comparison.kind == "compare" else "settings"
        show(comparison_table(comparison.rows, next(iter(comparison.summaries), {}), word))
        if comparison.summaries:
            typer.echo(f"report: {comparison.report}")
    for label, reason in comparison.failures.items():
        typer.echo(f"edgefl: {label} failed: {reason}", err=True)
    if comparison.failures:
        raise typer.Exit(FAILED)
