"""A checkpoint as other systems read it: projections apart, in the benchmark's dtype, cached."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYOUT_KEY = "phalanx_layout"
_WEIGHTS = "model.safetensors"


def separate_checkpoint(source: Path, dtype: str, cache_dir: Path) -> Path:
    """`source` itself unless it is in our fused layout; then a copy of it that is not."""
    config = json.loads((source / "config.json").read_text())
    if config.pop(LAYOUT_KEY, None) is None:
        return source
    stamp = (source / _WEIGHTS).stat()
    name = f"{source.name}-{dtype}-{stamp.st_size}-{int(stamp.st_mtime)}"
    target = cache_dir / "bench" / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
        folder = Path(scratch) / "whole"
        folder.mkdir()
        for path in source.iterdir():
            if path.name not in (_WEIGHTS, "config.json"):
                shutil.copy2(path, folder)
        heads = _head_sizes(config)
        tensors: dict[str, Tensor] = {}
        for tensor_name, tensor in load_file(source / _WEIGHTS).items():
            tensors.update(_apart(tensor_name, tensor.to(getattr(torch, dtype)), heads))
        save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
        config.update(dtype=dtype, torch_dtype=dtype)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        folder.rename(target)
    return target


def _head_sizes(config: dict[str, int]) -> tuple[int, int, int]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv = config.get("num_key_value_heads", heads) * head_dim
    return heads * head_dim, kv, kv


def _apart(name: str, tensor: Tensor, heads: tuple[int, int, int]) -> dict[str, Tensor]:
    if "qkv_proj" in name:
        parts = zip("qkv", torch.split(tensor, list(heads)), strict=True)
        return {name.replace("qkv_proj", f"{letter}_proj"): p.contiguous() for letter, p in parts}
    if "gate_up_proj" in name:
        halves = zip(("gate", "up"), tensor.chunk(2), strict=True)
        return {name.replace("gate_up_proj", f"{kind}_proj"): p.contiguous() for kind, p in halves}
    return {name: tensor}
