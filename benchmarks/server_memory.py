"""Does a server's memory grow with its clients? FedAvg over gRPC with 10 clients and with 1,000.

The server is a process of its own, the clients live in another one; a model has 242,000 parameters, 1 MB.
Each client reports in each of two rounds. What counts is the most memory that the server's process has had:
until its last round is over, and until it has also written its results and the report, which holds a row per
client and predicts the run in virtual time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from support.measure import Line, parser, show

from edgefl.runtimes.grpc.local import free_addresses
from edgefl.runtimes.grpc.place import FleetFile

FEW, MANY = 10, 1000
EXPERIMENT = """
[method]
name = "fedavg"
[fleet]
devices = {{ laptop = {clients} }}
[network]
link = "ethernet"
[data]
name = "digits"
partition = {{ name = "iid" }}
[model]
name = "mlp"
hidden = [400, 526]
[train]
local_steps = 1
[evaluate]
every_rounds = 2
[stop]
rounds = 2
"""


def peaks_mb(clients: int) -> tuple[float, float]:
    """The most memory of the server's process in MB, before it writes results and in all."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "experiment.toml").write_text(EXPERIMENT.format(clients=clients))
        places = ((0,), tuple(range(1, clients + 1)))
        fleet = FleetFile("fleet", Path("experiment.toml"), free_addresses(2), places)
        (folder / "fleet.toml").write_text(fleet.to_toml())
        server, others = (_node(folder, i) for i in (0, 1))
        serving = peak = 0.0
        while server.poll() is None:
            peak = max(peak, _most_mb(server.pid))
            serving = serving if any((folder / "run").glob("*.csv")) else peak
            time.sleep(0.02)
        if server.returncode or others.wait():
            raise SystemExit((folder / "0.log").read_text())
        return serving, peak


def _node(folder: Path, node: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "edgefl.cli", "node", "--fleet", "fleet.toml", "--id", str(node)]
    command += ["--out", "run"] if node == 0 else []
    with (folder / f"{node}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)


def _most_mb(process: int) -> float:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return float(lines[0].split()[1]) / 1024 if lines else 0.0


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    few, many = peaks_mb(FEW), peaks_mb(MANY)
    whats = (f"memory of a server of {MANY:,} clients, 1 MB a model", "the same, report included")
    lines = [
        Line(what, most, "MB", f"with {FEW}", most / least, least=1.1, aim=1.05, smaller_is_better=True)
        for what, least, most in zip(whats, few, many, strict=True)
    ]
    show(lines, args.json)


if __name__ == "__main__":
    main()
