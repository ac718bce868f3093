"""The random pi0.5 of the policy benchmark: its sizes, and its checkpoint as LeRobot has them."""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

Shape = tuple[int, ...]
CAMERAS = ("front", "wrist", "side")
STATE_DIM, ACTION_DIM = 8, 7
_PALIGEMMA = "model.paligemma_with_expert.paligemma.model"
_EXPERT = "model.paligemma_with_expert.gemma_expert.model"


@dataclass(frozen=True)
class Geometry:
    """Named as the plugin's `PI05Config`. Heads and chunk are those of the published model."""

    vision_width: int = 768
    vision_inner_width: int = 3072
    vision_num_layers: int = 12
    vision_num_heads: int = 12
    patch_size: int = 14
    image_size: int = 224
    text_width: int = 1024
    text_inner_width: int = 4096
    expert_width: int = 512
    expert_inner_width: int = 2048
    num_layers: int = 12
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 256
    vocab_size: int = 32000
    chunk_size: int = 50
    max_action_dim: int = 32
    tokenizer_max_length: int = 200
    num_steps: int = 10

    @classmethod
    def quick(cls) -> Geometry:
        """Small enough to be measured in a minute."""
        return cls(
            vision_width=192,
            vision_inner_width=768,
            vision_num_heads=3,
            text_width=256,
            text_inner_width=1024,
            expert_width=128,
            expert_inner_width=512,
            head_dim=64,
            vocab_size=2000,
        )

    @property
    def description(self) -> str:
        return (
            f"vision {self.vision_width} x {self.vision_num_layers}, text {self.text_width} x "
            f"{self.num_layers} (mlp {self.text_inner_width}), expert {self.expert_width} x "
            f"{self.num_layers} (mlp {self.expert_inner_width}), vocabulary {self.vocab_size:,}"
        )


def policy_checkpoint(geometry: Geometry, cache_dir: Path) -> Path:
    """A directory with random weights in float32; the same for the same sizes, kept for later."""
    sizes = json.dumps(asdict(geometry)).encode()
    target = cache_dir / "bench" / f"pi05-{zlib.crc32(sizes):08x}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
        folder = Path(scratch) / "whole"
        folder.mkdir()
        tensors = {name: _random(name, shape) for name, shape in tensor_shapes(geometry)}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(_config(geometry), indent=2))
        folder.rename(target)
    return target


def tensor_shapes(geometry: Geometry) -> Iterator[tuple[str, Shape]]:
    """Every tensor that actions depend on."""
    g = geometry
    yield from _vision_shapes(g)
    yield from _linear(f"{_PALIGEMMA}.multi_modal_projector.linear", g.vision_width, g.text_width)
    text = f"{_PALIGEMMA}.language_model"
    yield f"{text}.embed_tokens.weight", (g.vocab_size, g.text_width)
    for index in range(g.num_layers):
        yield from _layer_shapes(f"{text}.layers.{index}", g, g.text_width, g.text_inner_width)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{text}.layers.{index}.{norm}.weight", (g.text_width,)
    yield f"{text}.norm.weight", (g.text_width,)
    width = g.expert_width
    for index in range(g.num_layers):
        yield from _layer_shapes(f"{_EXPERT}.layers.{index}", g, width, g.expert_inner_width)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield from _linear(f"{_EXPERT}.layers.{index}.{norm}.dense", width, 3 * width)
    yield from _linear(f"{_EXPERT}.norm.dense", width, 3 * width)
    yield from _linear("model.action_in_proj", g.max_action_dim, width)
    yield from _linear("model.action_out_proj", width, g.max_action_dim)
    for name in ("time_mlp_in", "time_mlp_out"):
        yield from _linear(f"model.{name}", width, width)


def _vision_shapes(g: Geometry) -> Iterator[tuple[str, Shape]]:
    tower, width = f"{_PALIGEMMA}.vision_tower.vision_model", g.vision_width
    patches = f"{tower}.embeddings.patch_embedding"
    yield f"{patches}.weight", (width, 3, g.patch_size, g.patch_size)
    yield f"{patches}.bias", (width,)
    positions = (g.image_size // g.patch_size) ** 2
    yield f"{tower}.embeddings.position_embedding.weight", (positions, width)
    for index in range(g.vision_num_layers):
        layer = f"{tower}.encoder.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{layer}.self_attn.{name}", width, width)
        yield from _linear(f"{layer}.mlp.fc1", width, g.vision_inner_width)
        yield from _linear(f"{layer}.mlp.fc2", g.vision_inner_width, width)
        yield from _layer_norm(f"{layer}.layer_norm1", width)
        yield from _layer_norm(f"{layer}.layer_norm2", width)
    yield from _layer_norm(f"{tower}.post_layernorm", width)


def _layer_shapes(
    name: str, g: Geometry, width: int, inner_width: int
) -> Iterator[tuple[str, Shape]]:
    heads, kv_heads = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    yield f"{name}.self_attn.q_proj.weight", (heads, width)
    yield f"{name}.self_attn.k_proj.weight", (kv_heads, width)
    yield f"{name}.self_attn.v_proj.weight", (kv_heads, width)
    yield f"{name}.self_attn.o_proj.weight", (width, heads)
    yield f"{name}.mlp.gate_proj.weight", (inner_width, width)
    yield f"{name}.mlp.up_proj.weight", (inner_width, width)
    yield f"{name}.mlp.down_proj.weight", (width, inner_width)


def _linear(name: str, width_in: int, width_out: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width_out, width_in)
    yield f"{name}.bias", (width_out,)


def _layer_norm(name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _random(name: str, shape: Shape) -> Tensor:
    """Products are about as long as what they multiply; vision's norms are around 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return values / torch.tensor(shape[1:]).prod().sqrt()
    around_one = name.endswith(
        ("layer_norm1.weight", "layer_norm2.weight", "post_layernorm.weight")
    )
    return values * 0.1 + (1.0 if around_one else 0.0)


def _config(g: Geometry) -> dict[str, object]:
    image = {"type": "VISUAL", "shape": [3, g.image_size, g.image_size]}
    cameras = {f"observation.images.{name}": image for name in CAMERAS}
    state = {"observation.state": {"type": "STATE", "shape": [STATE_DIM]}}
    return {
        "type": "pi05",
        "input_features": {**state, **cameras},
        "output_features": {"action": {"type": "ACTION", "shape": [ACTION_DIM]}},
        "device": "cpu",
        "dtype": "float32",
        "chunk_size": g.chunk_size,
        "n_action_steps": g.chunk_size,
        "max_action_dim": g.max_action_dim,
        "num_inference_steps": g.num_steps,
        "image_resolution": [g.image_size, g.image_size],
        "tokenizer_max_length": g.tokenizer_max_length,
    }
