"""Reads the transformer of a checkpoint as diffusers stores it, one tensor at a time, once all are
known to fit.

A matrix is packed as soon as it is whole, and a file is let go behind its last tensor: a model is not in
memory twice.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import torch

from phalanx.errors import CheckpointError
from phalanx.layers.checkpoint import Checkpoint, TensorNames
from phalanx.layers.weight_files import weight_files
from phalanx.layers.weight_slots import Slot
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.transformer import Cosmos3Transformer
from phalanx.models.cosmos3.weights import targets_of, unused_names

logger = logging.getLogger(__name__)

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


def load_weights(
    transformer: Cosmos3Transformer, directory: Path, device: torch.device, *, strict: bool = True
) -> None:
    """Fill every parameter with what this rank holds of it, on `device`, in its fastest form there.

    Raises `CheckpointError` naming missing, unexpected and misshapen tensors, or a damaged file;
    unless `strict`, unexpected ones are left out, and logged.
    """
    folder = directory / FOLDER
    unused, targets = unused_names(transformer.config), targets_of(transformer)
    left_out: list[str] = []

    def is_left_out(name: str) -> bool:
        if name in unused or strict or name in targets:
            return name in unused
        left_out.append(name)
        return True

    filled: Counter[Slot] = Counter()
    with Checkpoint(weight_files(folder, STEM)) as checkpoint:
        names = TensorNames(folder, "Cosmos3", is_left_out)
        for target, read in checkpoint.fitting(targets, names, once=True):
            slot = target.slot
            lent = target.place(read(), device)
            filled[slot] += target.rows
            if slot.linear is None:
                if lent:
                    slot.own()  # what still referred to a file would keep it mapped
            elif slot.is_here and filled[slot] == slot.shape[0]:
                transformer.pack_matrix(slot.linear)
    if left_out:
        shown = ", ".join(sorted(left_out)[:3])
        logger.warning("%s: %d tensors are not loaded: %s, ...", folder, len(left_out), shown)
