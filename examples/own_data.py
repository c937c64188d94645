"""Train on arrays of your own: write them to an .npz file and name it in the experiment.

    python examples/own_data.py [FOLDER]

The arrays here are made up: two measurements of five machines, and whether each needs care. `owners` says
which machine an example comes from, so that `partition = "owner"` gives each device the data of one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import edgefl

EXPERIMENT = """
[method]
name = "fedavg"

[fleet]
devices = { raspberry-pi-5 = 5 }

[data]
name = "folder"
folder = "machines.npz"
partition = "owner"

[model]
name = "linear"

[train]
learning_rate = 0.5
local_epochs = 1

[stop]
rounds = 20
"""


def made_up(num_examples: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs (n, 2), labels (n,) 0 or 1, and owners (n,) 0 to 4."""
    rng = np.random.default_rng(seed)
    owners = rng.integers(0, 5, num_examples)
    inputs = rng.normal(size=(num_examples, 2)) + 0.3 * owners[:, None]
    return inputs, (inputs.sum(axis=1) > 1.2).astype(np.int64), owners


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    x_train, y_train, owners = made_up(500, seed=0)
    x_test, y_test, _ = made_up(200, seed=1)
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    np.savez(folder / "machines.npz", owners=owners, **arrays)
    (folder / "machines.toml").write_text(EXPERIMENT)
    run = edgefl.run(folder / "machines.toml", out=folder / "run")
    print(f"accuracy {run.summary['final_accuracy']:.3f} on {len(y_test)} test examples")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own-data"))
