"""Reads a checkpoint's safetensors into a decoder, one tensor at a time, once all are known to fit.

Two layouts are accepted: Hugging Face's separate projections, and the fused one of converted
checkpoints. What a rank holds of a tensor is used as it lies in the mapped file where its dtype and
device fit and it lies there in one piece; else it is copied into place. So no second copy of the
weights ever exists, and a rank reads what it holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from phalanx.layers.checkpoint import Checkpoint, TensorNames
from phalanx.layers.weight_files import weight_files
from phalanx.layers.weight_slots import Target
from phalanx.models.causal_lm.config import DecoderConfig
from phalanx.models.causal_lm.decoder import Decoder

_FUSED = re.compile(r"\.(qkv_proj|gate_up_proj)\.")
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


def opened(directory: Path) -> Checkpoint:
    """The weights files of a checkpoint. Raises `CheckpointError` for a missing or damaged one."""
    return Checkpoint(weight_files(directory))


def names_in(directory: Path, config: DecoderConfig) -> TensorNames:
    """What is known of the names of a checkpoint's tensors."""
    unused = partial(ignored, config=config)
    return TensorNames(directory, config.architecture, unused, is_fused)


def load_weights(
    decoder: Decoder,
    targets: Mapping[str, Target],
    directory: Path,
    device: torch.device,
    *,
    copy: bool = False,
) -> None:
    """Fill every parameter of `decoder`, whose places for tensors are `targets`.

    With `copy` nothing refers to the files afterwards, which may then be written to in place. Raises `CheckpointError` naming missing, unexpected and misshapen tensors, or a damaged file.
    """
    with opened(directory) as checkpoint:
        for target, read in checkpoint.fitting(targets, names_in(directory, decoder.config)):
            if target.place(read(), device) and copy:
                target.slot.own()
    if decoder.config.tied_head:
        decoder.tie_head()


def is_fused(name: str) -> bool:
    """Whether a tensor of this name is several others, which also have names of their own."""
    return bool(_FUSED.search(name))


def ignored(name: str, config: DecoderConfig) -> bool:
    """Whether a checkpoint may have a tensor of this name that the model does not need."""
    return bool(_IGNORED.search(name)) or (name == "lm_head.weight" and config.tied_head)
