"""Compiles the event kernel where EDGEFL_COMPILE=1 says so; without it the very same modules are interpreted.

Compiled or not, a run gives the same files, byte for byte.
"""

import os

from setuptools import setup

KERNEL = (
    "edgefl/nodes/handles.py",
    "edgefl/nodes/operations.py",
    "edgefl/nodes/traffic.py",
    "edgefl/runtimes/inbox.py",
    "edgefl/runtimes/interpreter.py",
    "edgefl/runtimes/log.py",
    "edgefl/runtimes/tasks.py",
    "edgefl/runtimes/virtual/hubs.py",
    "edgefl/runtimes/virtual/links.py",
    "edgefl/runtimes/virtual/processor.py",
    "edgefl/runtimes/virtual/runtime.py",
    "edgefl/runtimes/virtual/sharing.py",
    "edgefl/runtimes/virtual/transit.py",
)


def kernel() -> list:
    if os.environ.get("EDGEFL_COMPILE") != "1":
        return []
    from mypyc.build import mypycify  # mypy is needed for this alone

    flags = ["--follow-imports=skip", "--config-file="]
    return mypycify([*flags, *KERNEL], opt_level="3", debug_level="0", group_name="edgefl_kernel")


setup(ext_modules=kernel())
