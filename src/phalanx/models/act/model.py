"""ACT at inference: an encoder over state and image features, a decoder of one query an action.

Its latent is the prior's mean, zeros; the encoder that training draws it from is not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.models.act.backbone import OUTPUT_WIDTH, Backbone
from phalanx.models.act.config import BLOCKS, ACTConfig
from phalanx.processing.policy.features import PolicyFeatures


class Layer(nn.Module):
    """Attention to itself, where `crossed` then to the encoder's memory, then two linear layers."""

    def __init__(self, config: ACTConfig, *, crossed: bool = False) -> None:
        super().__init__()
        width = config.dim_model
        for name in ("self_attn", "multihead_attn")[: 1 + crossed]:
            self.add_module(name, nn.MultiheadAttention(width, config.n_heads, batch_first=True))
        self.linear1 = nn.Linear(width, config.dim_feedforward)
        self.linear2 = nn.Linear(config.dim_feedforward, width)
        for name in ("norm1", "norm2", "norm3")[: 2 + crossed]:
            self.add_module(name, nn.LayerNorm(width))
        relu = config.feedforward_activation == "relu"
        self._act: Callable[[Tensor], Tensor] = functional.relu if relu else functional.gelu
        self._pre_norm = config.pre_norm
        self._crossed = crossed

    def forward(self, x: Tensor, at: Tensor, memory: Tensor, memory_at: Tensor) -> Tensor:
        x = self._residual("norm1", x, lambda y: self._attend("self_attn", y + at, y + at, y))
        if self._crossed:
            keys = memory + memory_at
            x = self._residual(
                "norm2", x, lambda y: self._attend("multihead_attn", y + at, keys, memory)
            )
        last = "norm3" if self._crossed else "norm2"
        return self._residual(last, x, lambda y: self.linear2(self._act(self.linear1(y))))

    def _attend(self, name: str, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found: Tensor = self.get_submodule(name)(queries, keys, values, need_weights=False)[0]
        return found

    def _residual(self, name: str, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        norm = self.get_submodule(name)
        changed: Tensor = x + change(norm(x)) if self._pre_norm else norm(x + change(x))
        return changed


class ACT(nn.Module):
    """Normalized images and state to a chunk of normalized actions; named as LeRobot's `model`."""

    def __init__(self, config: ACTConfig, features: PolicyFeatures) -> None:
        super().__init__()
        width = config.dim_model
        plain = [Layer(config) for _ in range(config.n_encoder_layers)]
        crossed = [Layer(config, crossed=True) for _ in range(config.n_decoder_layers)]
        norm = nn.LayerNorm(width) if config.pre_norm else nn.Identity()
        self.backbone = Backbone(BLOCKS[config.vision_backbone])
        self.encoder = nn.ModuleDict({"layers": nn.Sequential(*plain), "norm": norm})
        self.decoder = nn.ModuleDict(
            {"layers": nn.Sequential(*crossed), "norm": nn.LayerNorm(width)}
        )
        self.encoder_robot_state_input_proj = nn.Linear(features.state_dim or 0, width)
        self.encoder_latent_input_proj = nn.Linear(config.latent_dim, width)
        self.encoder_img_feat_input_proj = nn.Conv2d(OUTPUT_WIDTH, width, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(2, width)
        self.decoder_pos_embed = nn.Embedding(features.horizon, width)
        self.action_head = nn.Linear(width, features.action_dim)
        self._cameras = tuple(features.cameras)
        self._latent_dim = config.latent_dim

    @torch.inference_mode()
    def forward(self, images: Mapping[str, Tensor], state: Tensor) -> Tensor:
        latent = self.encoder_latent_input_proj(state.new_zeros(len(state), self._latent_dim))
        tokens = [latent[:, None], self.encoder_robot_state_input_proj(state)[:, None]]
        positions = [self.encoder_1d_feature_pos_embed.weight]
        for camera in self._cameras:
            seen = self.backbone(images[camera])
            tokens.append(self.encoder_img_feat_input_proj(seen).flatten(2).transpose(1, 2))
            positions.append(plane_positions(seen, latent.shape[-1]))
        x, at = torch.cat(tokens, 1), torch.cat(positions)
        memory = _run(self.encoder, x, at, x, at)
        queries = self.decoder_pos_embed.weight
        start = torch.zeros_like(queries).expand(len(state), -1, -1)
        actions: Tensor = self.action_head(_run(self.decoder, start, queries, memory, at))
        return actions.float()


def _run(stack: nn.ModuleDict, x: Tensor, at: Tensor, memory: Tensor, memory_at: Tensor) -> Tensor:
    for layer in stack["layers"].children():
        x = layer(x, at, memory, memory_at)
    normed: Tensor = stack["norm"](x)
    return normed


def plane_positions(seen: Tensor, width: int) -> Tensor:
    """Sines and cosines of a feature map's rows, then of its columns, (H W, width), as DETR's."""
    rows, columns, half = *seen.shape[-2:], width // 2
    pairs = torch.arange(half, dtype=torch.float32, device=seen.device) // 2
    frequency = 10000 ** (2 * pairs / half)

    def along(count: int) -> Tensor:
        at = torch.arange(1, count + 1, dtype=torch.float32, device=seen.device)
        angle = (at / (count + 1e-6) * (2 * math.pi))[:, None] / frequency
        return torch.stack((angle[:, 0::2].sin(), angle[:, 1::2].cos()), -1).flatten(1)

    y = along(rows)[:, None].expand(rows, columns, half)
    x = along(columns)[None].expand(rows, columns, half)
    return torch.cat((y, x), -1).flatten(0, 1).to(seen.dtype)
