"""Compiles the `.proto` files below `src/phalanx/wire` into one descriptor set a folder.

`python scripts/protocols.py` writes `descriptors.binpb` beside them; a test checks that it is up to
date. Needs grpcio-tools, which is a development dependency: running Phalanx does not need it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
WIRE = ROOT / "src" / "phalanx" / "wire"
DESCRIPTORS = "descriptors.binpb"


def protocol_folders() -> list[Path]:
    """The folders that hold `.proto` files."""
    return sorted({path.parent for path in WIRE.rglob("*.proto")})


def compiled(folder: Path) -> bytes:
    """The serialized `FileDescriptorSet` of a folder's files, each after those it imports."""
    sources = sorted(path.name for path in folder.glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / DESCRIPTORS
        flags = [f"--proto_path={folder}", f"--descriptor_set_out={target}", "--include_imports"]
        if protoc.main(["protoc", *flags, *sources]) != 0:
            raise SystemExit(f"{folder} does not compile; the compiler says why above")
        return target.read_bytes()


if __name__ == "__main__":
    for folder in protocol_folders():
        (folder / DESCRIPTORS).write_bytes(compiled(folder))
