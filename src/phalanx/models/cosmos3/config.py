"""The sizes of a Cosmos3 transformer, by the names that its `config.json` has for them; torch-free.

Fields that a file lacks are those of the published Nano; fields that are not known are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from phalanx.errors import CheckpointError, ConfigurationError

ACTIVATIONS = ("silu", "relu2")

_MARGIN = "unified_3d_mrope_temporal_modality_margin"


@dataclass(frozen=True)
class Cosmos3Config:
    """Raises `CheckpointError` for sizes that no such model can have.

    `rope_axes_dim`: rotary frequencies of the axes time, height and width. `hidden_act` is "silu"
    (a gated feed-forward) or "relu2" (squared, not gated).
    """

    hidden_size: int = 4096
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 12288
    vocab_size: int = 151936
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5e6
    rope_axes_dim: tuple[int, int, int] = (24, 20, 20)
    latent_channel: int = 48
    latent_patch_size: int = 2
    base_fps: float = 24.0
    enable_fps_modulation: bool = True
    unified_3d_mrope_temporal_modality_margin: int = 15000
    unified_3d_mrope_reset_spatial_ids: bool = True
    timestep_scale: float = 0.001
    action_gen: bool = True
    action_dim: int = 64
    num_embodiment_domains: int = 32
    sound_gen: bool = True
    sound_dim: int = 64
    sound_latent_fps: float = 25.0
    attention_bias: bool = False
    hidden_act: str = "silu"
    qk_norm_for_text: bool = True
    use_und_k_norm_for_gen: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            _check_kind(one.name, getattr(self, one.name), one.default)
        if self.hidden_act not in ACTIVATIONS:
            raise _impossible("hidden_act", self.hidden_act, f"one of {', '.join(ACTIVATIONS)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _impossible(
                "num_attention_heads",
                self.num_attention_heads,
                f"a multiple of num_key_value_heads={self.num_key_value_heads}",
            )
        self._check_rotary()

    def _check_rotary(self) -> None:
        axes, half = self.rope_axes_dim, self.head_dim // 2
        if self.head_dim % 2 or sum(axes) != half:
            raise _impossible(
                "rope_axes_dim", list(axes), f"three numbers that add up to head_dim / 2 = {half}"
            )
        height, width = (half + 1) // 3, half // 3
        if axes[1] > height or axes[2] > width:
            # They take every third frequency, so more do not find room.
            raise _impossible(
                "rope_axes_dim",
                list(axes),
                f"at most {height} for height and {width} for width, which take every third of "
                f"{half} frequencies",
            )

    @classmethod
    def from_file(cls, path: Path) -> Cosmos3Config:
        """Read a `config.json`. Raises `CheckpointError` where it cannot be read or is impossible."""
        try:
            raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist; give a directory of diffusers with transformer/, vae/ and "
                "scheduler/"
            ) from None
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        try:
            return cls.from_json(raw)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Cosmos3Config:
        """What a decoded `config.json` says."""
        names = {one.name for one in fields(cls)}
        found = {name: raw[name] for name in names & raw.keys() if raw[name] is not None}
        if "action_dim" not in found and raw.get("max_action_dim") is not None:
            found["action_dim"] = raw["max_action_dim"]
        found |= _axes(raw)
        config = cls(**found)
        patch_values = raw.get("patch_latent_dim")
        if patch_values is not None and patch_values != config.patch_latent_dim:
            raise _impossible(
                "patch_latent_dim",
                patch_values,
                f"latent_patch_size squared times latent_channel = {config.patch_latent_dim}",
            )
        return config

    @property
    def patch_latent_dim(self) -> int:
        """Numbers of one vision token."""
        return self.latent_patch_size**2 * self.latent_channel

    @property
    def q_rows(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def separate_text_keys(self) -> bool:
        """Whether text itself reads other keys than those that media read of it."""
        return self.use_und_k_norm_for_gen

    def check_tensor_parallel(self, size: int) -> None:
        """Refuse a number of ranks that the heads and the feed-forward do not divide by.

        Raises `ConfigurationError`.
        """
        for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size"):
            value = getattr(self, name)
            if size < 1 or value % size:
                allowed = [n for n in range(1, self.num_key_value_heads + 1) if self._divides(n)]
                raise ConfigurationError(
                    f"a tensor-parallel size of {size} does not divide this model's {name}={value};"
                    f" allowed: {', '.join(map(str, allowed))}"
                )

    def _divides(self, size: int) -> bool:
        sizes = (self.num_key_value_heads, self.num_attention_heads, self.intermediate_size)
        return not any(value % size for value in sizes)


def _axes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The frequencies of the axes, wherever a file has them."""
    axes = raw.get("rope_axes_dim")
    scaling = raw.get("rope_scaling")
    if axes is None and isinstance(scaling, Mapping):
        axes = scaling.get("mrope_section")
    if axes is None:
        return {}
    return {"rope_axes_dim": tuple(axes) if isinstance(axes, Sequence) else axes}


def _check_kind(name: str, value: object, default: object) -> None:
    if isinstance(default, tuple):
        fits, allowed = _is_axes(value), "three whole numbers"
    elif isinstance(default, bool):
        fits, allowed = isinstance(value, bool), "true or false"
    elif isinstance(default, str):
        fits, allowed = isinstance(value, str), "a string"
    elif isinstance(default, int):
        least = 0 if name == _MARGIN else 1
        fits, allowed = type(value) is int and value >= least, f"a whole number, {least} or more"
    else:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        fits, allowed = fits and 0 < value < math.inf, "a positive number"  # type: ignore[operator]
    if not fits:
        raise _impossible(name, value, allowed)


def _is_axes(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 3:
        return False
    return all(type(one) is int and one >= 0 for one in value)


def _impossible(name: str, value: object, allowed: str) -> CheckpointError:
    return CheckpointError(f"{name}={value!r} of a Cosmos3 transformer must be {allowed}")
