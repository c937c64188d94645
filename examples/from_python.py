"""The commands from Python: run one experiment, compare two methods on it, look at the tables.

    python examples/from_python.py [FOLDER]

writes what it runs into FOLDER, by default runs/from-python.
"""

from __future__ import annotations

import sys
from pathlib import Path

import edgefl

HERE = Path(__file__).resolve().parent


def main(folder: Path) -> None:
    experiment = HERE / "four_boards.toml"

    run = edgefl.run(experiment, method="fedavg", out=folder / "one", train__learning_rate=0.2)
    print(f"accuracy {run.summary['final_accuracy']:.3f} after {run.summary['time_s']:.2f} s")
    print(run.curve[["time_s", "value", "payload_bytes"]].tail(3).to_string(index=False))

    methods = ["fedavg", str(HERE / "push_gossip.py")]
    comparison = edgefl.compare(experiment, methods, seeds=[0, 1], jobs=1, out=folder / "two")
    print(comparison.table[["final_accuracy", "final_accuracy_ci95", "payload_bytes", "rank"]].to_string())
    print(f"report: {comparison.report}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/from-python"))
