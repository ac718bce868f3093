"""A Cosmos3 of random weights, in diffusers' layout and with a tokenizer, which loads in an instant:
for tests, demonstrations and benchmarks. Other sizes are other arguments.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from phalanx.schema.checkpoints import Progress
from phalanx.testing.tiny_tokenizer import write_byte_level_tokenizer

VISION_START = "<|vision_start|>"
Shapes = Iterator[tuple[str, tuple[int, ...]]]
_STEM = "diffusion_pytorch_model.safetensors"
_SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "num_train_timesteps": 1000,
    "solver_order": 2,
    "solver_type": "bh2",
    "predict_x0": True,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "use_karras_sigmas": True,
    "sigma_min": 0.147,
    "sigma_max": 200.0,
    "flow_shift": 1.0,
    "lower_order_final": True,
    "final_sigmas_type": "zero",
}


@dataclass(frozen=True)
class Cosmos3Sizes:
    """Of the transformer and of the autoencoder, whose latents have `latent_channel` numbers."""

    hidden_size: int = 48
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 96
    vocab_size: int = 400
    latent_channel: int = 6
    action_dim: int = 12
    num_embodiment_domains: int = 16
    sound_dim: int = 5
    vae_width: int = 8

    @property
    def transformer(self) -> dict[str, Any]:
        """What `transformer/config.json` says."""
        half = self.head_dim // 2
        side = half * 5 // 16
        return {
            "_class_name": "Cosmos3OmniTransformer",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e6,
            "rope_axes_dim": [half - 2 * side, side, side],
            "latent_channel": self.latent_channel,
            "latent_patch_size": 2,
            "patch_latent_dim": 4 * self.latent_channel,
            "action_gen": True,
            "action_dim": self.action_dim,
            "num_embodiment_domains": self.num_embodiment_domains,
            "sound_gen": True,
            "sound_dim": self.sound_dim,
            "sound_latent_fps": 25.0,
        }

    @property
    def vae(self) -> dict[str, Any]:
        """What `vae/config.json` says: the published shape in small."""
        return {
            "_class_name": "AutoencoderKLWan",
            "z_dim": self.latent_channel,
            "base_dim": self.vae_width,
            "decoder_base_dim": self.vae_width,
            "dim_mult": [1, 2, 2, 2],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True, True],
            "latents_mean": [0.0] * self.latent_channel,
            "latents_std": [1.0] * self.latent_channel,
            "is_residual": True,
            "patch_size": 2,
            "in_channels": 12,
            "out_channels": 12,
            "scale_factor_spatial": 16,
            "scale_factor_temporal": 4,
        }


def write_tiny_cosmos3(directory: Path, sizes: Cosmos3Sizes | None = None, seed: int = 0) -> Path:
    """`transformer/`, `vae/`, `scheduler/` and `text_tokenizer/`; other seeds are other weights."""
    sizes = sizes or Cosmos3Sizes()
    random = np.random.default_rng(seed)
    _write(directory / "transformer", sizes.transformer, dict(_transformer(sizes)), random)
    _write(directory / "vae", sizes.vae, dict(_autoencoder(sizes)), random)
    scheduler = directory / "scheduler"
    scheduler.mkdir(parents=True, exist_ok=True)
    (scheduler / "scheduler_config.json").write_bytes(msgspec.json.encode(_SCHEDULER))
    write_byte_level_tokenizer(directory / "text_tokenizer", more_special=[VISION_START])
    return directory


def cosmos3_tiny(cache_dir: Path, progress: Progress) -> Path:
    """The known name `cosmos3-tiny`: 1 MB of noise, to try commands and servers with."""
    target = cache_dir / "checkpoints" / "cosmos3-tiny"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".cosmos3-tiny.") as scratch:
            made = write_tiny_cosmos3(Path(scratch) / "made")
            with suppress(OSError):  # another process was faster
                made.rename(target)
        progress(1, 1)
    return target


def _write(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    random: np.random.Generator,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    save_file({name: _drawn(name, shape, random) for name, shape in shapes.items()}, folder / _STEM)


def _drawn(name: str, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    """Of a size that keeps numbers about as large as they came in."""
    if name.endswith(".gamma") or "norm" in name.rpartition(".")[0].rpartition(".")[2]:
        return np.ones(shape, np.float32)
    if len(shape) == 1:
        return (0.02 * random.standard_normal(shape)).astype(np.float32)
    fan_in = np.prod(shape[1:]) if ".fc." not in name and ".bias." not in name else 1000
    drawn: NDArray[np.float64] = random.standard_normal(shape) / np.sqrt(fan_in)
    return drawn.astype(np.float32)


def _transformer(sizes: Cosmos3Sizes) -> Shapes:
    width, patch = sizes.hidden_size, 4 * sizes.latent_channel
    yield "embed_tokens.weight", (sizes.vocab_size, width)
    yield "lm_head.weight", (sizes.vocab_size, width)
    yield "norm.weight", (width,)
    yield "norm_moe_gen.weight", (width,)
    for name, out, into in (
        ("proj_in", width, patch),
        ("proj_out", patch, width),
        ("time_embedder.linear_1", width, 256),
        ("time_embedder.linear_2", width, width),
        ("audio_proj_in", width, sizes.sound_dim),
        ("audio_proj_out", sizes.sound_dim, width),
    ):
        yield f"{name}.weight", (out, into)
        yield f"{name}.bias", (out,)
    yield "audio_modality_embed", (width,)
    yield "action_modality_embed", (width,)
    domains, actions = sizes.num_embodiment_domains, sizes.action_dim
    yield "action_proj_in.fc.weight", (domains, actions * width)
    yield "action_proj_in.bias.weight", (domains, width)
    yield "action_proj_out.fc.weight", (domains, width * actions)
    yield "action_proj_out.bias.weight", (domains, actions)
    for layer in range(sizes.num_hidden_layers):
        for name, shape in _layer(sizes):
            yield f"layers.{layer}.{name}.weight", shape


def _layer(sizes: Cosmos3Sizes) -> Shapes:
    width, inner, head = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    queries, keys = sizes.num_attention_heads * head, sizes.num_key_value_heads * head
    for suffix, q, k, v, out, norm in (
        ("", "to_q", "to_k", "to_v", "to_out", "norm_"),
        ("_moe_gen", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_"),
    ):
        yield f"input_layernorm{suffix}", (width,)
        yield f"post_attention_layernorm{suffix}", (width,)
        yield f"self_attn.{q}", (queries, width)
        yield f"self_attn.{k}", (keys, width)
        yield f"self_attn.{v}", (keys, width)
        yield f"self_attn.{out}", (width, queries)
        yield f"self_attn.{norm}q", (head,)
        yield f"self_attn.{norm}k", (head,)
        yield f"mlp{suffix}.gate_proj", (inner, width)
        yield f"mlp{suffix}.up_proj", (inner, width)
        yield f"mlp{suffix}.down_proj", (width, inner)


def _autoencoder(sizes: Cosmos3Sizes) -> Shapes:
    z, narrow, wide = sizes.latent_channel, sizes.vae_width, 2 * sizes.vae_width
    yield from _conv("quant_conv", 2 * z, 2 * z, 1, 1, 1)
    yield from _conv("post_quant_conv", z, z, 1, 1, 1)
    yield from _conv("encoder.conv_in", narrow, 12, 3, 3, 3)
    yield from _conv("encoder.conv_out", 2 * z, wide, 3, 3, 3)
    yield from _conv("decoder.conv_in", wide, z, 3, 3, 3)
    yield from _conv("decoder.conv_out", 12, narrow, 3, 3, 3)
    yield "encoder.norm_out.gamma", (wide, 1, 1, 1)
    yield "decoder.norm_out.gamma", (narrow, 1, 1, 1)
    for side in ("encoder", "decoder"):
        middle = f"{side}.mid_block"
        for index in range(2):
            yield from _res_block(f"{middle}.resnets.{index}", wide, wide)
        yield f"{middle}.attentions.0.norm.gamma", (wide, 1, 1)
        yield from _conv(f"{middle}.attentions.0.to_qkv", 3 * wide, wide, 1, 1)
        yield from _conv(f"{middle}.attentions.0.proj", wide, wide, 1, 1)
    for level, (out, into) in enumerate(
        ((narrow, narrow), (wide, narrow), (wide, wide), (wide, wide))
    ):
        block = f"encoder.down_blocks.{level}"
        yield from _res_block(f"{block}.resnets.0", out, into)
        if level < 3:
            yield from _conv(f"{block}.downsampler.resample.1", out, out, 3, 3)
        if level in (1, 2):
            yield from _conv(f"{block}.downsampler.time_conv", out, out, 3, 1, 1)
    for level, (out, into) in enumerate(((wide, wide), (wide, wide), (wide, wide), (narrow, wide))):
        block = f"decoder.up_blocks.{level}"
        for index, before in ((0, into), (1, out)):
            yield from _res_block(f"{block}.resnets.{index}", out, before)
        if level < 3:
            yield from _conv(f"{block}.upsampler.resample.1", out, out, 3, 3)
        if level in (0, 1):
            yield from _conv(f"{block}.upsampler.time_conv", 2 * out, out, 3, 1, 1)


def _res_block(name: str, out: int, into: int) -> Shapes:
    yield f"{name}.norm1.gamma", (into, 1, 1, 1)
    yield f"{name}.norm2.gamma", (out, 1, 1, 1)
    yield from _conv(f"{name}.conv1", out, into, 3, 3, 3)
    yield from _conv(f"{name}.conv2", out, out, 3, 3, 3)
    if out != into:
        yield from _conv(f"{name}.conv_shortcut", out, into, 1, 1, 1)


def _conv(name: str, *shape: int) -> Shapes:
    yield f"{name}.weight", shape
    yield f"{name}.bias", (shape[0],)
