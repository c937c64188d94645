"""Reports: one file, no network, every figure with its unit, nothing that files say taken for markup."""

from __future__ import annotations

import csv
import doctest
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from made_up_run import make_run, write_table

from edgefl.errors import ConfigError
from edgefl.experiment import statistics
from edgefl.experiment.report import html, intervals, links, svg, units, write_comparison, write_report
from edgefl.experiment.report.comparison import grouped
from edgefl.experiment.report.intervals import uses
from edgefl.experiment.report.read import RunFiles
from edgefl.experiment.report.slow import last_reports
from edgefl.experiment.report.svg import ticks
from edgefl.experiment.report.timeline import busy_shares, choose_window, down_times
from edgefl.experiment.report.units import number, plain, plus_minus, prefix_scale, scaled, seconds, share
from edgefl.experiment.statistics import mean_interval, ranks

VOID = {"meta", "br", "img", "hr", "path", "rect", "circle", "line"}


class Page(HTMLParser):
    """Checks that elements close in order, and collects text, references and section anchors."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.anchors: list[str] = []
        self.words: list[str] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID or (tag in ("rect", "circle") and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "xlink:href"):
                self.references.append(value or "")
            if tag == "section" and name == "id":
                self.anchors.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "fedavg-0")


def test_the_report_is_one_small_file_that_fetches_nothing(made: Path) -> None:
    path = write_report(made)
    source = path.read_text(encoding="utf-8")
    assert path == made / "report.html" and len(source) < 1_500_000
    assert all(reference.startswith("#") for reference in Page(source).references)
    assert not re.search(r"<(script|link|img|iframe|object)\b|url\(|@import", source)
    assert "default-src 'none'" in source
    assert [p.name for p in made.iterdir() if "partial" in p.name] == []


def test_the_report_has_all_sections_and_its_figures_with_units(made: Path) -> None:
    page = report(made)
    assert page.anchors == [
        "learning", "nodes", "slow", "timeline", "fleet",
        "data", "updates", "traffic", "events", "experiment",
    ]  # fmt: skip
    told = page.text
    # 30 rounds of 5 s; 24 clients x 30 rounds x 2 x 1 MB; 100 J a round; target in round 20 of 30.
    for words in (
        "fedavg on 25 nodes", "finished", "after 2 min 30 s of virtual time", "Payload sent 1.44 GB",
        "1.53 GB on the wire (modelled)", "Energy 3 kJ modelled", "Final accuracy 0.950",
        "It reached accuracy 0.9 after 100 s", "10 Mbit/s / 2 Mbit/s", "Raspberry Pi 4 Model B",
        "719 reports arrived in time and 1 did not", "1 × crash, 1 × back", "versions.torch 2.13.0",
    ):  # fmt: skip
        assert words in told, words


def test_why_slow_names_the_busiest_processor_the_fullest_link_and_who_held_rounds_up(made: Path) -> None:
    told = report(made).text
    assert "Busiest processor: client 3 (raspberry-pi-4b), at work for 40 % of the run." in told
    # 720 MB at 37.5 MB/s take 19.2 of the 150 s; a client's 30 MB at 0.25 MB/s 120 s.
    assert "the uplink of client 1 (jetson-orin-nano) (2 Mbit/s), which carried 80 % of what it can" in told
    assert "A link set the pace" in told
    assert (
        "One work item took 2 s on a raspberry-pi-4b and 200 ms on a laptop (medians), a factor of 10."
        in told
    )
    reports = last_reports(RunFiles(made))
    assert len(reports) == 30 and reports[0].node == 24  # of equal ones the last in the file
    assert (reports[0].computing_s, reports[0].sending_s) == (2.0, 1.0)


def test_what_files_say_is_never_markup(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", clients=3, rounds=4)
    evil = "<script>alert('&\"')</script>"
    for name, place in (("nodes", 2), ("spans", 4), ("events", 3), ("traffic", 2), ("partition", 1)):
        with (folder / f"{name}.csv").open(newline="") as file:
            rows = list(csv.reader(file))[1:]
        for row in rows:
            row[place] = evil
        write_table(folder, name, rows)
    info = json.loads((folder / "run.json").read_text())
    info["reason"] = info["summary"]["method"] = info["machine"][evil] = evil
    info["error"] = info["summary"]["target"]["metric"] = evil
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "experiment.toml").write_text(f'name = "{evil[:-20]}"\n# {evil}')
    for path in (write_report(folder), write_comparison([folder], tmp_path / "all.html")):
        source = path.read_text()
        assert "<script" not in source and "&lt;script&gt;" in source
        Page(source)


@pytest.mark.parametrize(
    "missing", ["curve", "nodes", "spans", "metrics", "traffic", "partition", "events", ""]
)
def test_files_may_be_missing_or_empty(tmp_path: Path, missing: str) -> None:
    """ "" stands for all of them."""
    gone = make_run(tmp_path / "gone", clients=4, rounds=3)
    bare = make_run(tmp_path / "bare", clients=4, rounds=3)
    for path in gone.glob(f"{missing or '*'}.csv"):
        path.unlink()
        write_table(bare, path.stem, [])
    if not missing:
        (gone / "experiment.toml").unlink()
        (bare / "experiment.toml").write_text("")
    for folder in (gone, bare):
        page = report(folder)
        assert "fedavg on 5 nodes" in page.text and page.anchors[-1] == "experiment"
        write_comparison([folder], tmp_path)


def test_a_run_that_failed_early_has_a_report_with_its_error(tmp_path: Path) -> None:
    info = {
        "schema": 1,
        "status": "failed",
        "reason": "client 2 failed",
        "error": "Traceback: boom",
        "summary": None,
    }
    (tmp_path / "run.json").write_text(json.dumps(info))
    told = report(tmp_path).text
    assert "failed" in told and "client 2 failed" in told and "Traceback: boom" in told


def test_no_run_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a folder with a readable run\.json") as refused:
        write_report(tmp_path)
    assert "\n" not in str(refused.value) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["curve.csv", "nodes.csv", "spans.csv", "traffic.csv", "experiment.toml"])
def test_a_file_that_is_no_text_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "run", clients=2, rounds=3)
    (folder / name).write_bytes(b"\xfe\x00\xb6")
    with pytest.raises(ConfigError, match=name):
        write_report(folder)


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("curve", "time_s", "1e308"),
        ("nodes", "node", "99999999999999999999999"),
        ("spans", "node", "1e308"),
        ("traffic", "encoded_bytes", "1e308"),
    ],
)
def test_absurd_figures_do_not_stop_a_report(tmp_path: Path, name: str, column: str, value: str) -> None:
    folder = make_run(tmp_path / "run", clients=2, rounds=3)
    lines = list(csv.reader((folder / f"{name}.csv").read_text().splitlines()))
    lines[1][lines[0].index(column)] = value
    (folder / f"{name}.csv").write_text("\n".join(map(",".join, lines)) + "\n")
    assert write_report(folder).is_file()


def test_a_thousand_nodes_stay_readable(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", clients=1000, rounds=5)
    source = write_report(folder).read_text()
    assert len(source) < 1_500_000
    assert "40 of 1001 nodes are shown, evenly spaced by id." in source
    assert "240 of 1000 nodes are drawn, evenly spaced in rank." in source


def test_use_counts_overlapping_transfers_once(made: Path) -> None:
    run = RunFiles(made)
    used = uses(run)
    assert used[0].sending_s == pytest.approx(30.0)  # 24 transfers at a time, one second in each of 30 rounds
    assert used[3].computing_s == pytest.approx(60.0) and used[3].only_sending_s == pytest.approx(30.0)
    assert down_times(run) == [(1, 15.0, 20.0)]


def test_busy_shares_of_slices(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", clients=1, rounds=4)
    spans = [(1, "compute", 1.0, 3.0, "a"), (1, "compute", 2.0, 3.5, "b"), (1, "compute", 6.0, 8.0, "c")]
    write_table(folder, "spans", spans)
    compute = RunFiles(folder).spans.of_kind("compute")
    assert busy_shares(compute, np.array([0.0, 2.0, 4.0, 6.0, 8.0])).tolist() == [0.5, 0.75, 0.0, 1.0]


def test_the_window_shows_a_few_rounds_and_not_all(made: Path) -> None:
    start, end = choose_window(RunFiles(made), range(25))
    assert start == 0.0 and 15.0 < end < 30.0


def test_a_comparison_groups_seeds_and_links_to_reports(tmp_path: Path) -> None:
    folders = [
        make_run(
            tmp_path / f"my runs/{method}-{seed}", clients=4, rounds=10, method=method, seed=seed, pace=pace
        )
        for method, pace in (("fedavg", 1.0), ("d-psgd", 2.0))
        for seed in (0, 1)
    ]
    write_report(folders[0])
    path = write_comparison(folders, tmp_path / "out")
    page = Page(path.read_text())
    assert path == tmp_path / "out" / "comparison.html"
    assert [r for r in page.references if not r.startswith("#")] == ["./../my%20runs/fedavg-0/report.html"]
    assert "2 methods compared" in page.text and "4 runs, 2 seeds (0, 1)" in page.text
    # Both seeds reach the target in round 7 of 10, of 5 and of 10 seconds.
    assert "fedavg 2 2 of 2 35 ± 0 s" in page.text and "d-psgd 2 2 of 2 70 ± 0 s" in page.text
    assert page.anchors == ["result", "curves", "time", "cost", "runs"]


@pytest.mark.parametrize(
    ("methods", "said"), [(("fedavg", "d-psgd"), "fedavg, d-psgd"), (("fedavg", "d-psgd", "bsp"), "3 alike")]
)
def test_a_comparison_says_who_shares_the_best_figure(
    tmp_path: Path, methods: tuple[str, ...], said: str
) -> None:
    folders = [make_run(tmp_path / method, clients=2, rounds=10, method=method) for method in methods]
    page = Page(write_comparison(folders, tmp_path / "out").read_text())
    assert f"Fastest to the target {said} 35 s" in page.text


def test_runs_of_one_method_are_grouped_by_what_differs(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"{i}", clients=2, rounds=3, seed=i % 2) for i in range(4)]
    for i, folder in enumerate(folders):
        with (folder / "experiment.toml").open("a") as file:
            file.write(f"[train]\nlearning_rate = {0.1 if i < 2 else 0.01}\n")
    groups = grouped([RunFiles(folder) for folder in folders])
    names = {label: [run.folder.name for run in runs] for label, runs in groups.items()}
    assert names == {
        "train.learning_rate = 0.1": ["0", "1"],
        "train.learning_rate = 0.01": ["2", "3"],
    }


@pytest.mark.parametrize("module", [html, intervals, links, statistics, svg, units])
def test_examples_in_docstrings(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


def test_units() -> None:
    assert [number(v) for v in (None, 0.0, 0.012345, 12.345, 1234.5)] == ["—", "0", "0.0123", "12.3", "1,234"]
    assert [scaled(v, "B") for v in (999.0, 1e3, 2.5e9, None)] == ["999 B", "1 kB", "2.50 GB", "—"]
    assert [seconds(v) for v in (0.0, 2e-5, 0.5, 119.0, 125.0, 9000.0)] == [
        "0 s", "20 µs", "500 ms", "119 s", "2 min 5 s", "2 h 30 min",
    ]  # fmt: skip
    assert (share(1, 400), share(0, 3), plain(0.30000000000000004)) == ("under 1 %", "0 %", "0.3")
    assert plus_minus(1.5e6, 2e5, prefix_scale(1.5e6, "B")) == "1.50 ± 0.20 MB"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 37.0), (-3e-4, 8e-4), (0.0, 2.5e9), (5.0, 5.0)])
def test_ticks_are_few_even_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 7 and all(low - 1e-12 <= t <= high + 1e-12 for t in found)
    steps = np.diff(found)
    assert np.allclose(steps, steps[:1])


def test_intervals_and_ranks() -> None:
    mean, half = mean_interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.303 / 3**0.5, abs=1e-3)
    assert mean_interval([5.0]) == (5.0, None) and mean_interval([]) == (None, None)
    assert ranks([(2.0, 0.0), (1.0, 5.0), (2.0, 0.0), (3.0, 0.0)]) == [2.5, 1.0, 2.5, 4.0]
