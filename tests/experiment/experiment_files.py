"""A small experiment file for tests of this room."""

from __future__ import annotations

from pathlib import Path

SMALL = """
seed = 3

[method]
name = "fedavg"
[method.divshare]
recipients = 2

[method.divshare-adpsgd]
recipients = 2

[method.divshare-swift]
recipients = 2
[method.fedprox]
proximal_mu = 0.1
[method.krum]
num_hostile = 0
[method.multi-krum]
num_hostile = 0

[fleet]
devices = { raspberry-pi-4b = 2, jetson-nano = 1, laptop = 1 }

[data]
num_train = 400
num_test = 100
partition = { name = "dirichlet", alpha = 0.5, min_examples = 4 }

[model]
hidden = [16, 12]

[train]
local_steps = 3

[stop]
rounds = 4

[smoke.stop]
rounds = 1
[smoke.fleet]
devices = { laptop = 2 }
"""


def small_file(folder: Path, *, replace: tuple[str, str] = ("", ""), more: str = "") -> Path:
    """The small experiment in `folder`, with one text in place of another and more at its end."""
    path = folder / "small.toml"
    text = SMALL.replace(*replace) if replace[0] else SMALL
    path.write_text(text + more, encoding="utf-8")
    return path
