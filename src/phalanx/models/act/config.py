"""Sizes of ACT, as `config.json` has them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from phalanx.errors import CheckpointError
from phalanx.processing.policy.features import CONFIG_FILE, PolicyFeatures

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
"""Residual blocks of each of the four layers of the vision backbones."""


class ACTConfig(msgspec.Struct, frozen=True):
    """Named as in the file; what only training reads is left out."""

    type: Literal["act"]
    dim_model: int
    n_heads: int
    dim_feedforward: int
    n_encoder_layers: int
    n_decoder_layers: int
    latent_dim: int
    vision_backbone: Literal["resnet18", "resnet34"]
    feedforward_activation: Literal["relu", "gelu"] = "relu"
    pre_norm: bool = False
    replace_final_stride_with_dilation: bool = False


def read_config(directory: Path) -> tuple[ACTConfig, PolicyFeatures]:
    """Sizes, and what goes in and out. Raises `CheckpointError` for what is not supported."""
    path, features = directory / CONFIG_FILE, PolicyFeatures.read(directory)
    try:
        config = msgspec.json.decode(path.read_bytes(), type=ACTConfig, strict=False)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: {error}; this plugin loads ACT of LeRobot") from error
    if config.replace_final_stride_with_dilation or not (features.cameras and features.state_dim):
        raise CheckpointError(f"{path}: only policies with cameras and a state, without dilation")
    return config, features
