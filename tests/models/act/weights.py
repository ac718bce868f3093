"""Random weights of the fixture's ACT, each tensor from a seed and its own name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

SEED = 11


def write_checkpoint(source: Path, directory: Path) -> Path:
    """The fixture at `source` as a checkpoint of its own, with weights."""
    directory.mkdir(parents=True)
    for path in source.iterdir():
        if path.name.startswith("policy_") or path.name == "config.json":
            (directory / path.name).write_bytes(path.read_bytes())
    names = json.loads((source / "tensor_names.json").read_text())
    tensors = {name: random_tensor(name, shape) for name, shape in names.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def random_tensor(name: str, shape: list[int]) -> torch.Tensor:
    """Products are about as long as what they multiply; norms are around 1."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    values = np.random.default_rng([SEED, key]).standard_normal(shape)
    if name.endswith("running_var"):
        values = 1 + 0.1 * np.abs(values)
    elif len(shape) > 1:
        values /= np.prod(shape[1:]) ** 0.5
    elif name.endswith("weight"):
        values = 1 + 0.1 * values
    else:
        values *= 0.1
    return torch.from_numpy(values).float()
