"""A weight of 8 bits, scaled per output channel, for activations quantized to 8 bits per token.

Activations are unsigned with zero point 128: signed ones run a reference kernel in oneDNN, and one
scale for a whole tensor instead of one a token ruins a language model.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from phalanx.errors import MissingDependencyError

ZERO_POINT = 128
LARGEST = 127


class OneDnnInt8Weight:
    """A `PackedWeight` that rounds: `dense()` is the nearest weight that 8 bits can hold."""

    def __init__(self, weight: Tensor) -> None:
        if weight.device.type != "cpu" or not _has_operator():
            raise MissingDependencyError(
                "quantization='int8' needs a torch build with oneDNN's quantized linear operator "
                "on a CPU; leave quantization unset or install a CPU build of torch"
            )
        rounded, self._scales = quantize_channels(weight)
        self._zero_points = torch.zeros(weight.shape[0], dtype=torch.int32)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._dtype = weight.dtype
        self._num_bytes = rounded.numel() + 8 * weight.shape[0]

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        quantized, token_scales = quantize_tokens(x)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            quantized, 1.0, ZERO_POINT, self._packed, self._scales, self._zero_points,
            None, 1.0, 0, x.dtype, "none", [], "",
        )  # fmt: skip
        out = out.mul_(token_scales)
        return out if bias is None else out.add_(bias)

    def dense(self) -> Tensor:
        rounded: Tensor = self._packed.to_dense()  # [in, out]
        return (rounded.float() * self._scales).t().contiguous().to(self._dtype)


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [out, in] as signed 8 bits, and the float32 scale of each channel [out]."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / LARGEST).clamp_(min=1e-12)
    return (wide / scales[:, None]).round_().to(torch.int8), scales


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [T, width] as unsigned 8 bits around 128, and the scale of each token [T, 1]."""
    scales = x.abs().amax(dim=1, keepdim=True).float().div_(LARGEST).clamp_(min=1e-12)
    quantized = (x / scales).round_().add_(ZERO_POINT).to(torch.uint8)
    return quantized, scales


@cache
def _has_operator() -> bool:
    """Whether this build of torch has oneDNN's quantized linear operator."""
    try:
        torch.ops.onednn.qlinear_prepack(torch.zeros(32, 32, dtype=torch.int8), None)
    except (AttributeError, RuntimeError):
        return False
    return True
