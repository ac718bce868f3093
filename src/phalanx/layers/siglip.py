"""The SigLIP vision tower: square patches, learned positions, no class token.

Architecture: Zhai et al. 2023 (SigLIP), as PaliGemma uses it: pre-norm layers with biases,
tanh-GELU, and a final layer norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.layers.linear import Linear
from phalanx.layers.token_blocks import token_blocks


@dataclass(frozen=True)
class SiglipShape:
    """Sizes of the tower; images are squares of `image_size` pixels with `num_channels` colours."""

    width: int
    inner_width: int
    num_layers: int
    num_heads: int
    patch_size: int
    image_size: int
    num_channels: int = 3
    eps: float = 1e-6

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_values(self) -> int:
        return self.num_channels * self.patch_size**2


class SiglipLayer(nn.Module):
    """One layer; tokens see all of their own image."""

    def __init__(self, shape: SiglipShape, dtype: torch.dtype) -> None:
        super().__init__()
        width = shape.width
        self.norm1 = nn.LayerNorm(width, shape.eps, dtype=dtype)
        self.qkv = Linear(width, 3 * width, bias=True, dtype=dtype)
        self.out = Linear(width, width, bias=True, dtype=dtype)
        self.norm2 = nn.LayerNorm(width, shape.eps, dtype=dtype)
        self.up = Linear(width, shape.inner_width, bias=True, dtype=dtype)
        self.down = Linear(shape.inner_width, width, bias=True, dtype=dtype)
        self._num_heads = shape.num_heads
        self._inner_width = shape.inner_width

    def forward(self, x: Tensor, num_images: int) -> Tensor:
        """`x` is [images * patches, width]."""
        qkv = self.qkv.forward(self.norm1(x))
        by_head = qkv.view(num_images, -1, 3, self._num_heads, x.shape[1] // self._num_heads)
        q, k, v = by_head.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out.forward(mixed.transpose(1, 2).reshape(x.shape))
        for block in token_blocks(x, self._inner_width):
            inner = functional.gelu(self.up.forward(self.norm2(block)), approximate="tanh")
            block.add_(self.down.forward(inner))
        return x


class SiglipTower(nn.Module):
    """Images to one vector a patch."""

    def __init__(self, shape: SiglipShape, dtype: torch.dtype) -> None:
        super().__init__()
        # The patches do not overlap, so their convolution is a product with each patch's values.
        self.patches = Linear(shape.patch_values, shape.width, bias=True, dtype=dtype)
        self.positions = nn.Parameter(
            torch.empty(shape.num_patches, shape.width, dtype=dtype), requires_grad=False
        )
        self.layers = nn.ModuleList(SiglipLayer(shape, dtype) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width, shape.eps, dtype=dtype)
        self._shape = shape
        self._dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        """Of images [N, C, S, S] the patches' vectors, [N * patches, width], row by row."""
        cut = self._cut(images).to(self._dtype)
        x = self.patches.forward(cut).view(len(images), -1, self._shape.width)
        x = (x + self.positions).flatten(0, 1)
        for layer in self.layers:
            x = layer.forward(x, len(images))
        normed: Tensor = self.norm(x)
        return normed

    def _cut(self, images: Tensor) -> Tensor:
        """The values of each patch, [N * patches, C * patch * patch], channel by channel."""
        channels, patch = self._shape.num_channels, self._shape.patch_size
        side = self._shape.image_size // patch
        trimmed = images[:, :, : side * patch, : side * patch]
        by_patch = trimmed.reshape(-1, channels, side, patch, side, patch)
        return by_patch.permute(0, 2, 4, 1, 3, 5).reshape(-1, self._shape.patch_values)
