"""Reading the documents: fenced blocks, links and anchors."""

from __future__ import annotations

import re
import runpy
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
_BOARD = "compute_flops = 9e9\nmemory_bytes_per_s = 4e9\nmemory_bytes = 1_500_000_000\n"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the file that its first line names, if it does."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        found = re.match(r"# ([\w-]+\.(?:toml|py))\n", self.text)
        return found[1] if found else None

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command line of a sh block, comments left out."""
        lines = (shlex.split(line, comments=True) for line in self.text.splitlines())
        return [line for line in lines if line]


@cache
def documents() -> dict[Path, str]:
    """The text of every document by its path: those written by hand, and the site's generated ones."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    notes = DOCS / "method-notes"
    written = [*top, *(page for page in sorted(DOCS.rglob("*.md")) if page.parent != notes)]
    generated = runpy.run_path(str(DOCS / "generate.py"))["pages"]()
    return {page: page.read_text(encoding="utf-8") for page in written} | {
        DOCS / name: text for name, text in generated.items()
    }


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page asks its reader to write, and a device profile."""
    for block in blocks(documents()[page]):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    (folder / "my-board.toml").write_text(_BOARD, encoding="utf-8")


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in _FENCE.findall(text)]


def links(text: str) -> list[str]:
    """The targets of a document's links and pictures, code left out."""
    return _LINK.findall(re.sub(r"`[^`]*`", "", _FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as the site makes them."""
    return {_slug(title) for title in _HEADING.findall(text)}


def _slug(title: str) -> str:
    plain = re.sub(r"[^\w\s-]", "", title).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)
