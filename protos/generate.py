"""Build the code in `edgefl/messages/v1/` from `protos/edgefl/v1/*.proto`: python protos/generate.py

The files keep their package path under `protos/`; the code lies in `edgefl.messages.v1`, so its imports of
one another are rewritten to that place. Needs grpcio-tools 1.72.1, whose stubs run on the widest range.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
OUTPUT = PROTOS.parent / "edgefl" / "messages" / "v1"
STUBS = ("exchange_pb2_grpc.py",)
"""Stubs that somebody uses: a stranger's, in tests. Services are served by handlers made by hand."""


def generate(output: Path) -> list[Path]:
    """Write the modules of every .proto file into `output`; returns their paths, by name."""
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.glob("edgefl/v1/*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        google = Path(grpc_tools.__file__).parent / "_proto"
        flags = [f"-I{PROTOS}", f"-I{google}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
        if protoc.main(["protoc", *flags, *sources]) != 0:
            raise SystemExit("protoc refused the files, see above")
        written = []
        for made in sorted(Path(folder, "edgefl", "v1").glob("*.py")):
            if made.name.endswith("_grpc.py") and made.name not in STUBS:
                continue
            text = made.read_text().replace("from edgefl.v1 import", "from edgefl.messages.v1 import")
            path = output / made.name
            path.write_text(text)
            written.append(path)
    return written


if __name__ == "__main__":
    for module in generate(OUTPUT):
        print(
            module.relative_to(Path.cwd()) if module.is_relative_to(Path.cwd()) else module, file=sys.stderr
        )
