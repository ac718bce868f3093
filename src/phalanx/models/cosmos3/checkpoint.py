"""Reads the transformer of a checkpoint as diffusers stores it, one tensor at a time, once all are
known to fit.
"""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.errors import CheckpointError
from phalanx.layers.checkpoint import Checkpoint, TensorNames
from phalanx.layers.weight_files import weight_files
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.transformer import Cosmos3Transformer
from phalanx.models.cosmos3.weights import targets_of, unused_names

FOLDER = "transformer"
STEM = "diffusion_pytorch_model"


def read_config(directory: Path) -> Cosmos3Config:
    """The sizes of the transformer in a checkpoint. Raises `CheckpointError`."""
    if not directory.is_dir():
        raise CheckpointError(
            f"checkpoint directory {str(directory)!r} does not exist; give a directory of diffusers "
            "with transformer/, vae/ and scheduler/"
        )
    return Cosmos3Config.from_file(directory / FOLDER / "config.json")


def load_weights(transformer: Cosmos3Transformer, directory: Path, device: torch.device) -> None:
    """Fill every parameter with what this rank holds of it, on `device`.

    Raises `CheckpointError` naming missing, unexpected and misshapen tensors, or a damaged file.
    """
    folder = directory / FOLDER
    unused = unused_names(transformer.config)
    names = TensorNames(folder, "Cosmos3", unused.__contains__)
    with Checkpoint(weight_files(folder, STEM)) as checkpoint:
        for target, read in checkpoint.fitting(targets_of(transformer), names):
            target.place(read(), device)
