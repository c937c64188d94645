"""The commands. Libraries are imported when a command needs them: `edgefl --help` loads none.

Exit codes: 0 done; 1 failed; 2 refused, nothing was changed; 130 interrupted (Ctrl-C, or SIGTERM).
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from edgefl.errors import ConfigError, EdgeflError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from edgefl.experiment.comparison import Comparison

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 refused (nothing was changed), 130 interrupted."
F = TypeVar("F", bound=Callable[..., None])

app = typer.Typer(
    name="edgefl",
    help="A testbed for federated and decentralized learning on edge devices.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file (TOML).", show_default=False)]
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="A setting in place of the file's; repeatable."),
]
MethodName = Annotated[str | None, typer.Option("--method", help="A method in place of the file's.")]
Out = Annotated[Path | None, typer.Option("--out", help="The folder to write; default: under runs/.")]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object per line on standard output, nothing else.")
]
Smoke = Annotated[bool, typer.Option("--smoke", help="A quick run: lay the file's [smoke] over it.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Seeds = Annotated[str | None, typer.Option("--seeds", metavar="0,1,2", help="Default: the file's seed.")]
NumSeeds = Annotated[int | None, typer.Option("--num-seeds", metavar="N", help="The seeds 0 to N-1.")]
Jobs = Annotated[int | None, typer.Option("--jobs", help="Runs at a time; default: one per processor.")]


def command(function: F) -> F:
    """Register a command whose errors become one line and an exit code."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt as error:
            _leave(INTERRUPTED, "; ".join(["interrupted", *getattr(error, "__notes__", [])]))
        except ConfigError as error:
            _leave(REFUSED, str(error))
        except EdgeflError as error:
            _leave(FAILED, str(error))
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            _leave(FAILED, f"{where}{error.strerror or error}")
        except Exception as error:
            _leave(FAILED, f"internal error: {type(error).__name__}: {error}; --debug shows where")

    app.command()(guarded)
    return function


def _leave(code: int, message: str) -> NoReturn:
    if os.environ.get("EDGEFL_DEBUG"):
        traceback.print_exc()
    typer.echo(f"edgefl: {message}", err=True)
    raise typer.Exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"edgefl {version('edgefl')}")
        raise typer.Exit


def _debug(wanted: bool) -> None:
    if wanted:
        os.environ["EDGEFL_DEBUG"] = "1"


@app.callback()
def front(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", callback=_debug, help="Show tracebacks, as EDGEFL_DEBUG=1 does.")
    ] = False,
) -> None:
    """What stands before every command."""


@command
def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The experiment file (TOML).", show_default=False)
    ] = None,
    settings: Set = [],  # noqa: B006 (typer copies it)
    method: MethodName = None,
    runtime: Annotated[str, typer.Option(help="virtual (simulated time) or local (real gRPC).")] = "virtual",
    processes: Annotated[bool, typer.Option("--processes", help="local: a process per node.")] = False,
    out: Out = None,
    seed: Annotated[int | None, typer.Option(help="A seed in place of the file's.")] = None,
    smoke: Smoke = False,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with an interrupted run.")] = None,
    executor: Annotated[
        str | None, typer.Option(help="How work is carried out, in place of the file's execution.executor.")
    ] = None,
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

    view = None if _silent(as_json, quiet) else RunView(_errors())
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
            experiment, runtime=runtime, out=out, progress=view, processes=processes, profiled=profile_run
        )
    if as_json:
        _emit(result.summary)
        return
    _show(run_table(result.summary))
    if profile_run and resume is None:
        from edgefl.experiment import profile

        text = (result.folder / profile.FILE).read_text(encoding="utf-8")
        typer.echo(profile.in_words(json.loads(text)))
    typer.echo(f"report: {result.folder / 'report.html'}")


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
    view = None if _silent(as_json, quiet) else BatchView(_errors())
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

    view = None if _silent(as_json, quiet) else BatchView(_errors())
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

    Ends at the first seed that hangs, diverges, fails or breaks an invariant, with the shortest schedule that
    still does, and the command that meets it again.
    """
    from edgefl.console import CheckView, check_lines
    from edgefl.experiment.check import Laboratory
    from edgefl.experiment.check import check as check_method

    laboratory = Laboratory(target, settings, smoke=smoke)
    view = None if _silent(as_json, quiet) else CheckView(_errors())
    found = check_method(laboratory, range(num_seeds) if seed is None else [seed], view)
    if as_json:
        _emit(*(laboratory.as_dict(trial) for trial in found.trials))
        if found.finding is not None:
            _emit({"shortest": laboratory.as_dict(found.finding.shortest), "replay": found.finding.replay})
    else:
        for line in check_lines(laboratory, found):
            typer.echo(line)
    if found.finding is not None:
        raise typer.Exit(FAILED)


@command
def methods(as_json: Json = False) -> None:
    """List the methods: family, roles, paper, runtimes."""
    from edgefl.experiment.runner import RUNTIMES
    from edgefl.nodes.registry import methods as registered

    rows = [
        {"name": m.name, "family": m.family, "title": m.title, "roles": list(m.roles), "needs": m.needs,
         "paper": m.paper, "runtimes": list(RUNTIMES)}
        for m in registered().values()
    ]  # fmt: skip
    if as_json:
        _emit(*rows)
        return
    from edgefl.console import table

    cells = [
        (r["name"], r["family"], ", ".join(r["roles"]), ", ".join(r["runtimes"]), r["paper"]) for r in rows
    ]
    _show(table(("method", "family", "roles", "runtimes", "paper"), cells))


@command
def devices(as_json: Json = False) -> None:
    """List the devices of the catalog with their figures."""
    from edgefl.devices import catalog

    profiles = [profile.model_dump() for profile in catalog().values()]
    if as_json:
        _emit(*profiles)
        return
    from edgefl.console import device_table

    _show(device_table(profiles))


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
        _emit(found.as_dict())
        return
    from edgefl.planview import plan_table, timeline

    _show(plan_table(found))
    for line in timeline(found):
        typer.echo(line)


@command
def profile(
    out: Annotated[
        Path | None, typer.Option(help="The profile to write, .toml or .json; default: none.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Time this model's steps too, by its name.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats: some 15 seconds.")] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine, in at most a minute, as a profile that [fleet] devices can name."""
    if out is not None and out.suffix not in (".toml", ".json"):
        raise ConfigError("--out", str(out), "a file that ends with .toml or .json")
    from edgefl.experiment import profiling
    from edgefl.planview import ProfileBar

    named = None if model is None else profiling.profiled_model(model)
    folder = Path() if out is None else out.parent
    if not folder.is_dir():
        raise ConfigError("--out", str(out), f"a file in a folder that exists; {folder} does not")
    with ProfileBar(None if _silent(as_json, False) else _errors()) as bar:
        found = profiling.measure_machine(
            name=None if out is None else out.stem, model=named, quick=quick, told=bar.told, folder=folder
        )
    if out is not None:
        profiling.write_profile(found, out)
    if as_json:
        _emit(found.model_dump())
    else:
        from edgefl.console import table

        _show(table(("figure", "measured"), profiling.table_rows(found)))
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

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    view = None if _silent(as_json, quiet) or not sys.stderr.isatty() else RunView(_errors())
    result = run_node(fleet, number, out=out, state=state, listen=listen, grace_s=grace, progress=view)
    if result is None:
        return
    if as_json:
        _emit(result.summary)
        return
    _show(run_table(result.summary))
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
            _emit(finding.as_dict())
        else:
            advice = f" -> {finding.advice}" if finding.advice else ""
            typer.echo(f"{finding.state:>4}  {finding.check}: {finding.found}{advice}")
    if any(finding.state == "fail" for finding in found):
        raise typer.Exit(FAILED)


def _silent(as_json: bool, quiet: bool) -> bool:
    return quiet or (as_json and not sys.stderr.isatty())


def _errors() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _show(renderable: object) -> None:
    from rich.console import Console

    # Without a terminal there is no width to keep to: a table read from a file is not cut at 80.
    Console(width=None if sys.stdout.isatty() else 160).print(renderable)


def _emit(*objects: Mapping[str, Any]) -> None:
    for one in objects:
        typer.echo(json.dumps(_plain(one), allow_nan=False))


def _plain(value: Any) -> Any:
    """As JSON has it: what is no number is null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


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
        _emit(*comparison.lines)
    else:
        from edgefl.console import comparison_table

        word = "method" if comparison.kind == "compare" else "settings"
        _show(comparison_table(comparison.rows, next(iter(comparison.summaries), {}), word))
        if comparison.summaries:
            typer.echo(f"report: {comparison.report}")
    for label, reason in comparison.failures.items():
        typer.echo(f"edgefl: {label} failed: {reason}", err=True)
    if comparison.failures:
        raise typer.Exit(FAILED)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    """The entry point of the `edgefl` program."""
    if sys.maxsize < 2**32:
        from edgefl.doctor import ON_32_BIT

        typer.echo(f"edgefl: {ON_32_BIT}", err=True)
        raise SystemExit(REFUSED)
    signal.signal(signal.SIGTERM, _interrupt)  # as `docker stop` sends it: leave a folder that can go on
    arguments = sys.argv[1:]
    app(sorted(arguments, key=lambda word: word != "--debug"))  # --debug may stand after the command too


if __name__ == "__main__":
    main()
