"""Where a run comes from: versions, commit, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import torch

import edgefl

GIT_TIMEOUT_S = 5.0


def versions() -> dict[str, str]:
    """Versions of what decides the numbers of a run."""
    try:
        own = version("edgefl")
    except PackageNotFoundError:
        own = "unknown"
    return {
        "edgefl": own,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def commit() -> str | None:
    """The commit of edgefl's sources, with "+" where they were changed since; None outside a checkout."""
    package = Path(edgefl.__file__).parent
    try:
        head = _git(package, "rev-parse", "HEAD")
        # Installed into an environment inside somebody else's checkout, the sources are not in its history.
        if not _git(package, "ls-files", "__init__.py"):
            return None
        changed = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S)
    return found.stdout.strip()


def machine() -> dict[str, Any]:
    """What this machine is."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
