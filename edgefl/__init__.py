"""edgefl: a testbed for federated and decentralized learning on edge devices.

From Python, the words of the command line:

    import edgefl
    run = edgefl.run("experiments/quickstart.toml", method="fedavg", train__local_steps=5)
    run.summary["final_accuracy"], run.curve
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgefl.experiment.api import check, run
    from edgefl.experiment.compare import compare
    from edgefl.experiment.results import load
    from edgefl.experiment.sweep import sweep

__all__ = ["check", "compare", "load", "run", "sweep"]

_HOMES = {
    "run": "edgefl.experiment.api",
    "check": "edgefl.experiment.api",
    "load": "edgefl.experiment.results",
    "compare": "edgefl.experiment.compare",
    "sweep": "edgefl.experiment.sweep",
}


def __getattr__(name: str) -> Any:
    """Names that need torch and more are imported when first used: `import edgefl` stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'edgefl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
