"""Reads the autoencoder of a checkpoint, the folder `vae/` as diffusers stores it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from phalanx.errors import CheckpointError
from phalanx.layers.checkpoint import Checkpoint, TensorNames
from phalanx.layers.shells import take_parameters
from phalanx.layers.weight_files import weight_files
from phalanx.layers.weight_slots import Slot, Target, replicated, whole
from phalanx.models.cosmos3.vae.blocks import ChannelNorm
from phalanx.models.cosmos3.vae.codec import WanVae
from phalanx.models.cosmos3.vae.config import VaeConfig
from phalanx.models.cosmos3.vae.convolution import CausalConv, FrameConv
from phalanx.parallel.sharding import Span

FOLDER = "vae"
STEM = "diffusion_pytorch_model"


def read_vae_config(directory: Path) -> VaeConfig:
    """The sizes of the autoencoder in a checkpoint's directory. Raises `CheckpointError`."""
    path = directory / FOLDER / "config.json"
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; give a directory of diffusers with transformer/, vae/ "
            "and scheduler/"
        ) from error
    return VaeConfig.from_json(document)


def load_vae(directory: Path, device: torch.device, dtype: torch.dtype) -> WanVae:
    """The autoencoder in a checkpoint's directory, in `dtype` on a GPU and in float32 on a CPU.

    Raises `CheckpointError` naming missing, unexpected and misshapen tensors, or a damaged file.
    """
    with torch.device("meta"):
        vae = WanVae(read_vae_config(directory))
    vae.to(torch.float32 if device.type == "cpu" else dtype)
    fill_vae(vae, directory, device)
    return vae


def fill_vae(vae: WanVae, directory: Path, device: torch.device) -> None:
    """Give an autoencoder of empty shells its weights. Raises as `load_vae`."""
    folder = directory / FOLDER
    names = TensorNames(folder, "the autoencoder of Wan 2.2")
    with Checkpoint(weight_files(folder, STEM)) as checkpoint:
        given = checkpoint.fitting(dict(_targets(vae)), names)
        take_parameters(vae, device)
        for target, read in given:
            _place(target, read(), device)


def _targets(vae: WanVae) -> Iterator[tuple[str, Target]]:
    """Where each tensor goes, by its name in a checkpoint."""
    for path, module in vae.named_modules():
        name = path.replace("spatial", "resample.1")
        match module:
            case CausalConv() | FrameConv():
                yield f"{name}.weight", _reshaped(module, "weight", module.stored_shape)
                yield f"{name}.bias", replicated(module, "bias")
            case ChannelNorm():
                yield f"{name}.gamma", _reshaped(module, "gamma", module.stored_shape)


def _reshaped(owner: nn.Module, attribute: str, stored: tuple[int, ...]) -> Target:
    return whole(Slot(owner, attribute, stored, (Span(0, stored[0]),)))


def _place(target: Target, tensor: Tensor, device: torch.device) -> None:
    owner = target.slot.owner
    match owner, target.slot.attribute:
        case ((CausalConv() | FrameConv()), "weight"):
            owner.place_weight(tensor)
        case ChannelNorm(), "gamma":
            owner.place_gamma(tensor)
        case _:
            target.place(tensor, device)
