"""What the commands share: the program, options of several commands, errors as exit codes, output."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from edgefl.errors import ConfigError, EdgeflError

if TYPE_CHECKING:
    from rich.console import Console

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
Smoke = Annotated[bool, typer.Option("--smoke", help="A quick run: lay the file's table `smoke` over it.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Seeds = Annotated[str | None, typer.Option("--seeds", metavar="0,1,2", help="Default: the file's seed.")]
NumSeeds = Annotated[int | None, typer.Option("--num-seeds", metavar="N", help="The seeds 0 to N-1.")]
Jobs = Annotated[int | None, typer.Option("--jobs", help="Runs at a time; default: one per processor.")]


def command(function: F) -> F:
    """Register a command of the program."""
    return command_of(app)(function)


def command_of(group: typer.Typer) -> Callable[[F], F]:
    """Register a command in a group of commands; its errors become one line and an exit code."""

    def register(function: F) -> F:
        group.command()(_guarded(function))
        return function

    return register


def _guarded(function: Callable[..., None]) -> Callable[..., None]:

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

    return guarded


def _leave(code: int, message: str) -> NoReturn:
    if os.environ.get("EDGEFL_DEBUG"):
        traceback.print_exc()
    typer.echo(f"edgefl: {message}", err=True)
    raise typer.Exit(code)


def silent(as_json: bool, quiet: bool) -> bool:
    return quiet or (as_json and not sys.stderr.isatty())


def errors() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def show(renderable: object) -> None:
    from rich.console import Console

    # Without a terminal there is no width to keep to: a table read from a file is not cut at 80.
    Console(width=None if sys.stdout.isatty() else 160).print(renderable)


def emit(*objects: Mapping[str, Any]) -> None:
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
