"""The house keeps its floors: who may import whom, read from the import statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "edgefl"

# Ground floor first. A room imports from lower floors only; two rooms of one floor do not import each other.
FLOORS = (
    ("errors", "keyed", "allocator", "sources", "whole"),
    ("parameters", "network"),
    ("devices", "data", "messages"),
    ("learning",),
    ("nodes",),
    ("patterns", "planning"),
    ("methods", "runtimes"),
    ("experiment",),
    ("fleet", "engines", "lab", "doctor", "edgefl"),  # edgefl: the package's own front, __init__.py
    ("console",),
    ("planview",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# What a method gets from its node instead: messages, time and chance.
FORBIDDEN_TO_METHODS = {"grpc", "asyncio", "time", "random", "threading", "socket", "multiprocessing"}
# A third-party framework has one adapter, so that replacing it is one file's work.
FRAMEWORKS = {"flwr", "opacus", "ray"}


def imports_of(source: str, module: str, is_package: bool) -> set[str]:
    """The dotted names that a module imports anywhere in it; `from a import b` counts as a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                up = parts[: len(parts) - node.level + is_package]
                base = ".".join([*up, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def modules() -> Iterator[tuple[str, set[str]]]:
    """Every module of edgefl by its dotted name, with what it imports."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        yield name, imports_of(path.read_text(encoding="utf-8"), name, is_package)


MODULES = dict(modules())


def room_of(name: str) -> str:
    """The room of a module's dotted name; the package's own front is a room too."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def rooms_imported(name: str) -> set[str]:
    """The rooms that a module imports, but for its own; what is no room is the front's (edgefl.run)."""
    found = {room_of(one) for one in MODULES[name] if one.startswith("edgefl.")}
    return {room if room in FLOOR else "edgefl" for room in found} - {room_of(name)}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def users_of(package: str) -> set[str]:
    """The modules that import `package` or something in it."""
    return {name for name, found in MODULES.items() if any(within(one, package) for one in found)}


def test_relative_and_nested_imports_are_read() -> None:
    source = "from . import x\nfrom ..a import b\ndef f():\n    import grpc.aio"
    assert imports_of(source, "edgefl.m.n", False) == {
        "edgefl.m", "edgefl.m.x", "edgefl.a", "edgefl.a.b", "grpc.aio",
    }  # fmt: skip
    assert "edgefl.m.n.x" in imports_of("from . import x", "edgefl.m.n", True)


def test_every_room_has_a_floor() -> None:
    assert {room_of(name) for name in MODULES} <= set(FLOOR)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down(name: str) -> None:
    floor = FLOOR[room_of(name)]
    upward = {room for room in rooms_imported(name) if FLOOR[room] >= floor}
    assert not upward, f"{name} imports from its own floor or above"


def test_methods_get_time_messages_and_chance_from_their_node() -> None:
    wrong = {
        name: tops
        for name, found in MODULES.items()
        if room_of(name) in ("methods", "patterns")
        and (tops := {one.split(".")[0] for one in found} & FORBIDDEN_TO_METHODS)
    }
    assert not wrong


def test_runtimes_do_not_know_each_other() -> None:
    kinds = {
        name
        for name in MODULES
        if name.count(".") == 2 and (PACKAGE / "runtimes" / name.split(".")[2]).is_dir()
    }
    kinds = {name for name in kinds if within(name, "edgefl.runtimes")}
    assert {"edgefl.runtimes.virtual", "edgefl.runtimes.grpc"} <= kinds
    for kind in kinds:
        others = {
            user for user in users_of(kind) if within(user, "edgefl.runtimes") and not within(user, kind)
        }
        assert not others, f"these import {kind}"


def test_generated_types_are_touched_in_one_module() -> None:
    users = {name for name in users_of("edgefl.messages.v1") if not within(name, "edgefl.messages.v1")}
    assert len(users) == 1
    assert within(users.pop(), "edgefl.messages")


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_a_framework_has_one_adapter(framework: str) -> None:
    assert len(users_of(framework)) <= 1


def test_nothing_imports_the_commands() -> None:
    assert users_of("edgefl.cli") == {"edgefl.__main__"}
