"""The entry point of the program `edgefl`, and `python -m edgefl`: light, so that an early Ctrl-C is met."""

from __future__ import annotations

INTERRUPTED = 130


def main() -> None:
    """Load the program and run it. Ctrl-C while it loads ends it without a traceback."""
    try:
        from edgefl.cli import main as program
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    program()


if __name__ == "__main__":
    main()
