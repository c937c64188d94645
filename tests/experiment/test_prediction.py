"""What virtual time predicts stands beside what a run on the wall clock came to."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from edgefl.console import run_table
from edgefl.experiment.build import Built, build
from edgefl.experiment.config import load_experiment
from edgefl.experiment.local import run_node
from edgefl.experiment.observer import RunObserver
from edgefl.experiment.prediction import beside
from edgefl.experiment.preview import go_through
from edgefl.experiment.report import write_report
from edgefl.experiment.runner import run_experiment
from edgefl.network import MeasuredLink
from edgefl.runtimes.grpc.local import free_addresses
from edgefl.runtimes.grpc.place import FleetFile
from edgefl.runtimes.virtual import VirtualRuntime

FILE = """
seed = 2
[method]
name = "METHOD"
[fleet]
devices = { laptop = 2, raspberry-pi-4b = 1 }
[network]
link = { up = "1 MB/s", down = "2 MB/s", latency = "10 ms" }
[data]
name = "synthetic"
num_owners = 3
examples_per_owner = 40
[model]
name = "linear"
[train]
local_steps = 2
[stop]
rounds = 6
"""


def built_of(folder: Path, method: str) -> Built:
    file = folder / f"{method}.toml"
    file.write_text(FILE.replace("METHOD", method))
    return build(load_experiment(file))


@pytest.mark.parametrize("method", ["fedavg", "d-psgd"])
def test_a_run_in_virtual_time_is_predicted_to_the_bit(tmp_path: Path, method: str) -> None:
    built = built_of(tmp_path, method)
    observer = RunObserver(built)
    outcome = VirtualRuntime(built.plan, observer, built.executor).run()
    summary, rows = beside(built, outcome, observer.paces, {})
    assert summary is not None
    assert summary["rounds"] == 6
    for key in ("round_s", "sent_bytes", "busy_s"):
        assert summary[key]["error"] == pytest.approx(0.0, abs=1e-12)
        assert summary[key]["measured"] > 0
    assert [row[0] for row in rows] == list(range(len(built.plan.nodes)))
    for row in rows:
        assert (
            row[1::2] == pytest.approx(row[2::2], nan_ok=True)
            if None not in row
            else row[1] is row[2] is None
        )


def test_figures_are_per_round_wherever_the_run_stopped(tmp_path: Path) -> None:
    built = built_of(tmp_path, "fedavg")
    outcome, watcher = go_through(built, 3)
    summary, _ = beside(built, outcome, watcher.published_at, {})
    assert summary is not None
    assert summary["rounds"] == 3
    assert abs(summary["sent_bytes"]["error"]) < 1e-12


def test_a_run_in_which_no_round_ended_has_none(tmp_path: Path) -> None:
    built = built_of(tmp_path, "fedavg")
    outcome, _ = go_through(built, 3)
    assert beside(built, outcome, {}, {}) == (None, [])


def test_a_local_run_shows_both(tmp_path: Path) -> None:
    built = built_of(tmp_path, "fedavg")
    result = run_experiment(built.experiment, runtime="local", out=tmp_path / "run")
    found = result.summary["predicted"]
    # Bytes are equal to the byte; on loopback, unslowed, a round is shorter than on lines of 10 ms.
    assert found["sent_bytes"]["error"] == 0
    assert found["round_s"]["predicted"] > 4 * 0.01
    # What was planned for other devices is no error of the prediction.
    assert not found["same_devices"] and found["round_s"]["error"] is found["busy_s"]["error"] is None
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["summary"]["predicted"]
    assert recorded == found
    with (tmp_path / "run" / "predicted.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["sent_bytes"] for row in rows] == [row["predicted_sent_bytes"] for row in rows]
    page = write_report(tmp_path / "run").read_text()
    assert "Predicted beside measured" in page
    assert "not slowed to the file&#x27;s devices, over loopback" in page and "are not compared" in page
    first = page.partition("time of a round")[2].partition("</tr>")[0]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", first)[2] == "—"
    shown = run_table(result.summary)
    words = dict(zip(*([str(cell) for cell in column.cells] for column in shown.columns), strict=True))
    assert "not slowed to the file's devices" in words["a round, on this machine"]
    assert words["a round, on the file's devices"].endswith("in virtual time")
    assert "(+0.0 %)" in words["sent in a round: measured, predicted"]


def test_an_emulated_run_has_the_latencies_that_are_predicted(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text(FILE.replace("METHOD", "fedavg") + "[execution]\nemulate = true\n")
    result = run_experiment(load_experiment(file), runtime="local", out=tmp_path / "run")
    # Each way is as long as both of its ends: 10 ms and the server's 5, there and back.
    for side in ("measured", "predicted"):
        assert result.summary["predicted"]["round_s"][side] > 2 * (0.01 + 0.005)
    assert result.summary["predicted"]["round_s"]["error"] is not None
    words = [str(cell) for cell in run_table(result.summary).columns[0].cells]
    assert "a round: measured, predicted" in words
    page = (tmp_path / "run" / "report.html").read_text()
    assert "slowed to the file&#x27;s devices, over loopback" in page


def test_without_the_prediction(tmp_path: Path) -> None:
    built = built_of(tmp_path, "fedavg")
    result = run_experiment(built.experiment, runtime="local", out=tmp_path / "run", predict=False)
    assert "predicted" not in result.summary
    assert not (tmp_path / "run" / "predicted.csv").exists()
    assert "Predicted beside measured" not in write_report(tmp_path / "run").read_text()


def test_links_that_processes_measured_stand_beside_those_of_the_file(tmp_path: Path) -> None:
    built = built_of(tmp_path, "fedavg")
    run_experiment(built.experiment, runtime="local", out=tmp_path / "run", predict=False)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    link = MeasuredLink("h:1", 0.03, 0.1, 8e5, None, None, 1, 1.0)
    (tmp_path / "run" / "run.json").write_text(json.dumps(record | {"links": {"1": link.as_dict()}}))
    page = write_report(tmp_path / "run").read_text()
    # 1 MB/s up in the file, 0.8 measured; 10 ms and the server's 5, 30 measured; down was not told.
    row = page.partition("Links, as processes measured them")[2].partition("</table>")[0]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", row)
    assert cells == [
        "client 1 (laptop)", "800 kB/s", "1 MB/s", "+25.0 %", "—", "2 MB/s", "—", "30 ms", "15 ms", "-50.0 %",
    ]  # fmt: skip


def test_a_fleet_on_this_machines_loopback_is_not_the_files_devices(tmp_path: Path) -> None:
    built_of(tmp_path, "fedavg")
    everybody = FleetFile("fleet", Path("fedavg.toml"), free_addresses(1), ((0, 1, 2, 3),))
    (tmp_path / "fleet.toml").write_text(everybody.to_toml())
    result = run_node(tmp_path / "fleet.toml", 0, out=tmp_path / "run")
    assert result is not None
    found = result.summary["predicted"]
    assert not found["same_devices"] and found["round_s"]["error"] is None
