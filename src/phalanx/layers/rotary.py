"""Rotary position embedding: cosines and sines of every position, in float32.

Formulas: default, Su et al. 2021 (RoFormer), half-split as in Hugging Face's Llama; linear, Chen et
al. 2023 (position interpolation); llama3, the frequency-dependent scaling of Meta's llama-models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeParameters:
    """`theta` and, for the scaled types, the numbers of a checkpoint's `rope_scaling`."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise CheckpointError(
                f"rope type {self.rope_type!r} is not supported; allowed: {', '.join(ROPE_TYPES)}"
            )
        for name in ("theta", "factor", "low_freq_factor", "original_max_position_embeddings"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise CheckpointError(f"rope parameter {name}={value!r} must be a positive number")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise CheckpointError(
                f"rope parameter high_freq_factor={self.high_freq_factor!r} must be larger than "
                f"low_freq_factor={self.low_freq_factor!r}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> RopeParameters:
        """Read a Hugging Face `config.json`: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
        fields: dict[str, object] = {}
        for key in ("rope_scaling", "rope_parameters"):
            part = config.get(key)
            if part is None:
                continue
            if not isinstance(part, Mapping):
                raise CheckpointError(f"{key}={part!r} must be an object")
            fields.update(part)
        rope_type = str(fields.get("rope_type", fields.get("type", "default")))
        theta = fields.get("rope_theta", config.get("rope_theta", cls.theta))
        numbers = {"theta": _number("rope_theta", theta)}
        for name in _SCALING_FIELDS.get(rope_type, ()):
            if name not in fields:
                raise CheckpointError(f"rope type {rope_type!r} needs the field {name!r}")
            numbers[name] = _number(name, fields[name])
        original = numbers.pop("original_max_position_embeddings", 8192)
        return cls(rope_type=rope_type, original_max_position_embeddings=int(original), **numbers)


_SCALING_FIELDS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


class RotaryEmbedding(nn.Module):
    """Tables [max_positions, head_dim / 2] of cosines and sines, indexed by position."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        parameters: RopeParameters,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise CheckpointError(f"head_dim={head_dim} must be even for rotary positions")
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(head_dim, parameters)
        self.register_buffer("cos", angles.cos().to(device), persistent=False)
        self.register_buffer("sin", angles.sin().to(device), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of `positions` [T], each float32 [T, head_dim / 2]; once a step suffices."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def inverse_frequencies(head_dim: int, parameters: RopeParameters) -> Tensor:
    """The rotation per position of each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / parameters.theta**exponents
    if parameters.rope_type == "linear":
        return frequencies / parameters.factor
    if parameters.rope_type == "llama3":
        return _llama3(frequencies, parameters)
    return frequencies


def _llama3(frequencies: Tensor, parameters: RopeParameters) -> Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a linear ramp between them."""
    context = parameters.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    low, high = parameters.low_freq_factor, parameters.high_freq_factor
    ramp = (context / wavelengths - low) / (high - low)
    blended = (1 - ramp) * frequencies / parameters.factor + ramp * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / parameters.factor, blended)
    return torch.where(wavelengths < context / high, frequencies, scaled)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"rope parameter {name}={value!r} must be a number")
    return float(value)
