"""Finding methods: a module under edgefl.methods that holds METHOD is registered; a user's own file too."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from functools import cache
from pathlib import Path

from edgefl.errors import ConfigError, nearest
from edgefl.nodes.method import Method


@cache
def methods() -> dict[str, Method]:
    """All installed methods by name, sorted."""
    package = importlib.import_module("edgefl.methods")
    found: dict[str, Method] = {}
    for info in pkgutil.walk_packages(package.__path__, "edgefl.methods."):
        method = getattr(importlib.import_module(info.name), "METHOD", None)
        if isinstance(method, Method):
            if method.name in found:
                raise RuntimeError(f"two methods are called {method.name!r}")
            found[method.name] = method
    return dict(sorted(found.items()))


def find_method(name: str) -> Method:
    """A method by its name, or from a Python file of the user's own that defines METHOD.

    Raises ConfigError for an unknown name (naming the nearest) or a file without a METHOD.
    """
    if name.endswith(".py"):
        return _from_file(Path(name))
    known = methods()
    if name not in known:
        raise ConfigError("method.name", name, nearest(name, known))
    return known[name]


def _from_file(path: Path) -> Method:
    if not path.is_file():
        raise ConfigError("method.name", str(path), "no such file; a method's name or its .py file is needed")
    spec = importlib.util.spec_from_file_location(f"edgefl_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            "method.name", str(path), f"it does not import: {type(error).__name__}: {error}"
        ) from error
    method = getattr(module, "METHOD", None)
    if not isinstance(method, Method):
        raise ConfigError("method.name", str(path), "a module that defines METHOD = Method(...) is needed")
    return method
