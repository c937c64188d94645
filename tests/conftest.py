"""Shared by all tests: one torch thread, so that tests that run side by side do not wait for each other."""

import sys
from pathlib import Path

import pytest
import torch

import edgefl

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


def pytest_configure():
    """Refuse to test a compiled kernel whose sources are others by now."""
    for compiled in Path(edgefl.__file__).parent.rglob("*.so"):
        source = compiled.with_name(compiled.name.split(".")[0] + ".py")
        if source.stat().st_mtime > compiled.stat().st_mtime:
            raise pytest.UsageError(f"{source} is newer than what was compiled of it: make compile")
