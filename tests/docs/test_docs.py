"""The documents hold: links resolve, blocks are what they say they are, generated pages are up to date."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from documents import DOCS, ROOT, anchors, blocks, documents, links, write_files

from edgefl.experiment.build import build
from edgefl.experiment.config import load_experiment
from edgefl.experiment.folder import COLUMNS
from edgefl.experiment.runner import run_experiment
from edgefl.nodes.registry import find_method, methods
from edgefl.runtimes.grpc.place import read_fleet

EXPERIMENTS = sorted(ROOT.glob("experiments/**/*.toml"))
GUIDES = [*sorted((DOCS / "tutorials").glob("*.md")), *sorted((DOCS / "how-to").glob("*.md"))]
FOUR_BOARDS = ROOT / "examples" / "four_boards.toml"


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_links_lead_somewhere():
    lost = []
    for page, text in documents().items():
        for link in links(text):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if link.startswith(("http://", "https://", "<http")):
                continue
            if target not in documents() and not target.exists():
                lost.append(f"{name(page)}: {link}")
            elif anchor and anchor not in anchors(documents()[target]):
                lost.append(f"{name(page)}: {link} (no such heading)")
    assert not lost


def test_links_of_written_pages_lead_to_files_without_the_site_too():
    lost = []
    for page in filter(Path.exists, documents()):
        targets = (
            link.partition("#")[0] for link in links(page.read_text(encoding="utf-8")) if "://" not in link
        )
        lost += [f"{name(page)}: {link}" for link in targets if not (page.parent / link).exists()]
    assert not lost


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    in_docs = [page.relative_to(DOCS) for page in documents() if page.is_relative_to(DOCS)]
    listed = [page for page in in_docs if page.parent != Path("reference/methods") or page.name == "index.md"]
    assert not [str(page) for page in listed if f": {page}\n" not in navigation]


def test_every_key_of_the_experiment_file_is_explained():
    """Against what a resolved file holds: a key that a run has is on the page, with its default."""
    page = documents()[DOCS / "reference" / "experiment-file.md"]
    for line in load_experiment(FOUR_BOARDS).to_toml().splitlines():
        key, equals, _ = line.partition(" = ")
        assert not equals or key in methods() or f"| `{key}` |" in page, key


def test_method_pages_hold_notes_settings_and_the_source():
    page = documents()[DOCS / "reference" / "methods" / "fedprox.md"]
    assert "**Under faults.**" in page and "| `proximal_mu` | number ≥ 0 | `0.01` | mu:" in page
    assert "https://arxiv.org/abs/1812.06127" in page and "crashes, returns, partitions" in page
    index = documents()[DOCS / "reference" / "methods" / "index.md"]
    assert all(f"[{method}]({method}.md)" in index for method in methods())


def test_notes_are_on_methods_that_exist():
    assert {page.stem for page in (DOCS / "method-notes").glob("*.md")} <= set(methods())


def test_the_run_folder_page_lists_every_table_and_column():
    page = documents()[DOCS / "reference" / "run-folder.md"]
    for table, columns in COLUMNS.items():
        assert f"| `{table}.csv` | " + ", ".join(f"`{column}`" for column in columns) + " |" in page


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_blocks_are_what_they_say(page, tmp_path, monkeypatch):
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for block in blocks(documents()[page]):
        if block.language == "toml":
            assert block.file, "a toml block of a guide names its file"
            read = read_fleet if block.file == "fleet.toml" else load_experiment
            read(tmp_path / block.file)
        elif block.language == "python":
            compile(
                "async def program(node):\n" + block.text if block.text[0] == " " else block.text,
                name(page),
                "exec",
            )
            if block.file:
                assert find_method(block.file).name == "push-gossip"


def options(command: str) -> set[str]:
    """The options that the commands' page lists for one of them."""
    page = documents()[DOCS / "reference" / "commands.md"]
    section = page.partition(f"## edgefl {command}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE))


def test_commands_and_their_options_exist():
    known = {command for command, _ in runpy.run_path(str(DOCS / "generate.py"))["commands"]()}
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = [
        words
        for text in documents().values()
        for block in blocks(text)
        if block.language == "sh"
        for words in block.commands
    ]
    assert len(lines) > 30
    for words in lines:
        if words[0] == "edgefl":
            command = words[1] if words[1] in known else " ".join(words[1:3])
            assert command in known, words
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= options(command), words
        elif words[0] == "make":
            assert all(f"\n{word}:" in targets for word in words[1:] if "=" not in word), words
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), words


@pytest.mark.parametrize("file", EXPERIMENTS, ids=name)
def test_experiments_can_be_built(file):
    """In full and with their smoke overlay: every setting fits the others."""
    assert build(load_experiment(file)).parts
    assert build(load_experiment(file, smoke=True)).parts


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=[] if f.stem == "quickstart" else pytest.mark.slow) for f in EXPERIMENTS],
    ids=name,
)
def test_experiments_run_their_smoke(file, tmp_path):
    result = run_experiment(load_experiment(file, smoke=True), out=tmp_path / "run")
    assert result.summary["status"] in ("finished", "stopped")
    assert result.summary["final_metric"] is not None


def test_the_example_method_learns(tmp_path):
    """From its neighbors: more than without any exchange."""
    accuracy = {}
    for method in (str(ROOT / "examples" / "push_gossip.py"), "local-only"):
        experiment = load_experiment(FOUR_BOARDS, ["stop.rounds=40"], method=method)
        result = run_experiment(experiment, out=tmp_path / Path(method).stem)
        accuracy[Path(method).stem] = result.summary["final_accuracy"]
    assert accuracy["push_gossip"] > accuracy["local-only"] + 0.05


@pytest.mark.parametrize("script", ["from_python.py", "own_data.py"])
def test_examples_run(script, tmp_path, capsys):
    main = runpy.run_path(str(ROOT / "examples" / script))["main"]
    main(tmp_path)
    accuracy = float(capsys.readouterr().out.split("accuracy ")[1].split()[0])
    assert accuracy > 0.85


def test_the_measured_profile_is_one(tmp_path):
    measure = runpy.run_path(str(ROOT / "examples" / "measure_device.py"))["profile"]
    (tmp_path / "here.toml").write_text(measure(FOUR_BOARDS), encoding="utf-8")
    devices = 'fleet.devices={"here.toml" = 2}'
    shutil.copy(FOUR_BOARDS, tmp_path / "four.toml")
    result = run_experiment(load_experiment(tmp_path / "four.toml", [devices]), out=tmp_path / "run")
    assert 0 < result.summary["busy_s"] < 10


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_the_commands_of_guides_run(page, tmp_path):
    """In the order of the page, in a fresh folder; no installation, --resume, or what needs two machines."""
    write_files(page, tmp_path)
    for folder in ("examples", "experiments"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in (
        line
        for block in blocks(documents()[page])
        if block.language == "sh"
        for line in block.text.splitlines()
    ):
        elsewhere = ("python3 -m venv", "pip", "make", "edgefl node", "edgefl probe")
        if line.startswith(elsewhere) or "--resume" in line:
            continue
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env={**os.environ, "PATH": programs},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stderr}"
