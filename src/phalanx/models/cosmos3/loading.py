"""From a checkpoint's directory to a transformer in its fastest form on this device."""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.device.operators.base import Operators
from phalanx.heap import give_back_freed_memory
from phalanx.models.cosmos3.checkpoint import load_weights, read_config
from phalanx.models.cosmos3.transformer import Cosmos3Transformer
from phalanx.parallel.ranks import Ranks


def load_transformer(
    directory: Path,
    operators: Operators,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks,
    *,
    strict: bool = True,
) -> Cosmos3Transformer:
    """This rank's part of the transformer in `directory`, in `dtype`, but for the embedding of times.
    `strict` as of `load_weights`.

    Raises `CheckpointError` for one that does not fit, `ConfigurationError` for ranks that it does
    not divide by.
    """
    transformer = Cosmos3Transformer(read_config(directory), operators, dtype, ranks)
    load_weights(transformer, directory, device, strict=strict)
    transformer.rotary.to(device)
    give_back_freed_memory()  # what they were read and packed from
    return transformer
