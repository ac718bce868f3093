"""What diffusers computed, as it was stored: tensors by name, and the checkpoint's folders."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

FIXTURES = Path(__file__).parents[2] / "fixtures" / "cosmos3"


@cache
def tensors(name: str) -> dict[str, Tensor]:
    """Those of `name`.safetensors, such as `silu/io`; nobody may change them."""
    return safetensors.torch.load(lzma.decompress(_file(f"{name}.safetensors.xz").read_bytes()))


def document(name: str) -> Any:  # noqa: ANN401
    """`name`.json, such as `silu/config`."""
    return json.loads(_file(f"{name}.json").read_text())


def unpack(name: str, file: Path) -> None:
    """Write `name`.safetensors out, where a test needs it as a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(lzma.decompress(_file(f"{name}.safetensors.xz").read_bytes()))


def checkpoint(directory: Path, family: str = "silu") -> Path:
    """A pipeline's folders as diffusers stores them: transformer/, vae/, scheduler/."""
    for name, folder, config in (
        (family, "transformer", "config.json"),
        ("vae", "vae", "config.json"),
    ):
        unpack(f"{name}/model", directory / folder / "diffusion_pytorch_model.safetensors")
        (directory / folder / config).write_text(json.dumps(document(f"{name}/config")))
    scheduler = directory / "scheduler"
    scheduler.mkdir(parents=True, exist_ok=True)
    (scheduler / "scheduler_config.json").write_text(json.dumps(document("scheduler")))
    return directory


def _file(name: str) -> Path:
    file = FIXTURES / name
    assert file.is_file(), f"no fixture {name}; there are {sorted(FIXTURES.rglob('*.*'))}"
    return file
