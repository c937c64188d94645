"""The program `edgefl`. Libraries are imported when a command needs them: `edgefl --help` loads none.

Exit codes: 0 done; 1 failed; 2 refused, nothing was changed; 130 interrupted (Ctrl-C, or SIGTERM).
"""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from edgefl.commands import experiments, laboratory, machines, probing
from edgefl.commands.shared import EXIT_CODES, REFUSED, app

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["EXIT_CODES", "app", "main"]

COMMANDS = (experiments, laboratory, machines, probing)
"""Modules that register their commands when they are imported."""


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


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


class _Output(io.FileIO):
    """A standard stream that swallows what nobody reads any more, as after `edgefl ... | head`."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def _fit_streams() -> None:
    """Let everything be printed: what a terminal has no letters for as "?", to closed streams nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the process)
        elif isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _outlasting(stream))


def _outlasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream, over an `_Output` where a file or a pipe lies under it."""
    if type(getattr(stream.buffer, "raw", stream.buffer)) is not io.FileIO:  # a console of Windows, a test
        stream.reconfigure(errors="replace")
        return stream
    raw = _Output(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # as `python -u` does
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def main() -> None:
    """The entry point of the `edgefl` program."""
    _fit_streams()
    if sys.maxsize < 2**32:
        from edgefl.doctor import ON_32_BIT

        typer.echo(f"edgefl: {ON_32_BIT}", err=True)
        raise SystemExit(REFUSED)
    try:
        os.getcwd()
    except OSError:  # PyTorch would end the process
        typer.echo("edgefl: the working directory is gone; change to one that exists", err=True)
        raise SystemExit(REFUSED) from None
    signal.signal(signal.SIGTERM, _interrupt)  # as `docker stop` sends it: leave a folder that can go on
    arguments = sys.argv[1:]
    try:
        app(sorted(arguments, key=lambda word: word != "--debug"))  # --debug may stand after the command too
    finally:
        exec("")  # else `python -m` ends by SIGINT after one that came in an exec, as of a dataclass
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # one more of them ends it at once, without a traceback


if __name__ == "__main__":
    main()
