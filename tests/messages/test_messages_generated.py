"""The generated code is what the .proto files give."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from edgefl.messages.wire import EXCHANGE_SERVICE

ROOT = Path(__file__).resolve().parents[2]
V1 = ROOT / "edgefl" / "messages" / "v1"


def test_generating_again_changes_nothing(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    made = {path.name: path.read_text() for path in generate.generate(tmp_path)}
    kept = {path.name: path.read_text() for path in V1.glob("*_pb2*.py")}
    assert made == kept


def test_the_service_has_its_published_name() -> None:
    assert EXCHANGE_SERVICE == "edgefl.v1.ExchangeService"
