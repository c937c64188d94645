"""The tables that pages show are those of the commands that they name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from documents import DOCS, ROOT, blocks, documents, write_files

METHODS = re.search(r"^METHODS := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
assert METHODS
SHOWN = {
    ROOT / "README.md": f"edgefl compare experiments/quickstart.toml --methods {METHODS[1]}",  # make run
    DOCS / "tutorials" / "first-experiment.md": "edgefl run first.toml",
    DOCS / "tutorials" / "first-method.md": "edgefl compare gossip.toml",
    DOCS / "how-to" / "sweep.md": "edgefl sweep examples/four_boards.toml",
}
CLOSE = 0.02
"""Other machines and versions of PyTorch end in other last digits."""


def rows(text: str) -> list[list[str]]:
    """The cells of a table in text, its rule and what took its time here left out."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [
        re.split(r"\s{2,}", line) for line in lines if line[0] != "─" and not line.startswith("took here")
    ]


def numbers(cell: str) -> tuple[str, list[float]]:
    """A cell's words, with its numbers beside them."""
    found = r"\d[\d,]*\.?\d*"
    return re.sub(found, "#", cell), [float(n.replace(",", "")) for n in re.findall(found, cell)]


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_a_page_shows_the_table_of_its_command(page: Path, tmp_path: Path) -> None:
    found = blocks(documents()[page])
    commands = [" ".join(words) for b in found if b.language == "sh" for words in b.commands]
    line = next((c for c in commands if c.startswith(SHOWN[page])), SHOWN[page])
    shown = next(b.text for b in found if b.language == "text" and "─────" in b.text)
    write_files(page, tmp_path)
    for folder in ("examples", "experiments"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    command = [sys.executable, "-m", *shlex.split(line), "--quiet"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    printed = rows(done.stdout.partition("report: ")[0])
    assert len(printed) == len(rows(shown)) > 3
    for here, there in zip(printed, rows(shown), strict=True):
        for one, other in zip(here, there, strict=True):
            (words, figures), (known, expected) = numbers(one), numbers(other)
            assert words == known, (one, other)
            assert figures == pytest.approx(expected, rel=CLOSE, abs=CLOSE), (one, other)
