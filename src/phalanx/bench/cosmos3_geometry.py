"""The random Cosmos3 of the benchmark: its sizes, and its checkpoint as diffusers lays one out.

Weights are random, since the speed of a matrix product depends on what is in it. The autoencoder, the
noise levels and the tokenizer are those of the known model `cosmos3-tiny`; nothing is decoded.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from phalanx.checkpoints import checkpoint_dir

Shape = tuple[int, ...]
_REST = "cosmos3-tiny"
_STEM = "diffusion_pytorch_model"


@dataclass(frozen=True)
class Geometry:
    """Named as in `transformer/config.json`; proportions are those of the published Nano."""

    hidden_size: int = 768
    num_hidden_layers: int = 10
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 128
    intermediate_size: int = 2304
    vocab_size: int = 4000
    action_dim: int = 64
    num_embodiment_domains: int = 16

    @classmethod
    def quick(cls) -> Geometry:
        """A tenth of the work."""
        return cls(
            hidden_size=384, num_attention_heads=3, num_key_value_heads=1, intermediate_size=1152,
            num_hidden_layers=4,
        )  # fmt: skip

    @classmethod
    def nano(cls) -> Geometry:
        """The published Nano, but for its vocabulary, of which a step computes nothing."""
        return cls(
            hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
            intermediate_size=12288, num_hidden_layers=36, num_embodiment_domains=32,
        )  # fmt: skip

    @classmethod
    def super(cls) -> Geometry:
        """The published Super, likewise."""
        return cls(
            hidden_size=5120, num_attention_heads=64, num_key_value_heads=8,
            intermediate_size=25600, num_hidden_layers=64, num_embodiment_domains=32,
        )  # fmt: skip

    @property
    def description(self) -> str:
        return (
            f"width {self.hidden_size} x {self.num_hidden_layers} in each stream, "
            f"{self.num_attention_heads} heads of {self.head_dim} "
            f"({self.num_key_value_heads} of keys), mlp {self.intermediate_size}"
        )


def cosmos3_checkpoint(
    geometry: Geometry, dtype: str, cache_dir: Path, device: str = "cpu"
) -> Path:
    """A directory with random weights; the same for the same sizes, kept for later.

    `device` draws them, which a CPU does slowly.
    """
    rest = checkpoint_dir(_REST)
    channels = json.loads((rest / "vae" / "config.json").read_text())["z_dim"]
    sizes = json.dumps([asdict(geometry), dtype, channels, device]).encode()
    target = cache_dir / "bench" / f"cosmos3-{zlib.crc32(sizes):08x}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
        folder = Path(scratch) / "whole"
        for name in ("vae", "text_tokenizer"):
            shutil.copytree(rest / name, folder / name)
        _write_scheduler(rest / "scheduler" / "scheduler_config.json", folder / "scheduler")
        _Writer(folder / "transformer", getattr(torch, dtype), device).write(geometry, channels)
        folder.rename(target)
    return target


def _write_scheduler(source: Path, folder: Path) -> None:
    """Shifted levels, which both systems are asked for."""
    stored = json.loads(source.read_text()) | {"use_karras_sigmas": False, "flow_shift": 5.0}
    folder.mkdir()
    (folder / source.name).write_text(json.dumps(stored, indent=2))


class _Writer:
    """Writes a file a layer, so that a large model needs no more memory than one of them."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        folder.mkdir()
        self._folder, self._dtype, self._device = folder, dtype, device
        self._places: dict[str, str] = {}

    def write(self, geometry: Geometry, channels: int) -> None:
        self._save("outer", outer_shapes(geometry, channels))
        for index in range(geometry.num_hidden_layers):
            self._save(f"layer-{index:02d}", layer_shapes(f"layers.{index}", geometry))
        index_file = {"metadata": {}, "weight_map": self._places}
        path = self._folder / f"{_STEM}.safetensors.index.json"
        path.write_text(json.dumps(index_file))
        config = _config(geometry, channels)
        (self._folder / "config.json").write_text(json.dumps(config, indent=2))

    def _save(self, part: str, shapes: Iterator[tuple[str, Shape]]) -> None:
        tensors = {name: self._random(name, shape) for name, shape in shapes}
        file = f"{_STEM}-{part}.safetensors"
        save_file(tensors, self._folder / file, {"format": "pt"})
        self._places |= dict.fromkeys(tensors, file)

    def _random(self, name: str, shape: Shape) -> Tensor:
        """Products are about as long as what they multiply; norms are 1."""
        if "norm" in name:
            return torch.ones(shape, dtype=self._dtype)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator, device=self._device)
        scale = 0.02 if len(shape) == 1 or ".fc." in name or ".bias." in name else shape[1] ** -0.5
        # Times are embedded in float32 whatever the rest is in.
        dtype = torch.float32 if name.startswith("time_embedder") else self._dtype
        return values.mul_(scale).to("cpu", dtype)


def outer_shapes(g: Geometry, channels: int) -> Iterator[tuple[str, Shape]]:
    """Every tensor that is of no layer."""
    width, patch = g.hidden_size, 4 * channels
    yield "embed_tokens.weight", (g.vocab_size, width)
    yield "lm_head.weight", (g.vocab_size, width)
    yield "norm.weight", (width,)
    yield "norm_moe_gen.weight", (width,)
    for name, out, into in (
        ("proj_in", width, patch),
        ("proj_out", patch, width),
        ("time_embedder.linear_1", width, 256),
        ("time_embedder.linear_2", width, width),
    ):
        yield f"{name}.weight", (out, into)
        yield f"{name}.bias", (out,)
    domains = g.num_embodiment_domains
    for name, into, out in (("in", g.action_dim, width), ("out", width, g.action_dim)):
        yield f"action_proj_{name}.fc.weight", (domains, into * out)
        yield f"action_proj_{name}.bias.weight", (domains, out)
    yield "action_modality_embed", (width,)


def layer_shapes(layer: str, g: Geometry) -> Iterator[tuple[str, Shape]]:
    """Every tensor of a layer, of both streams."""
    width, inner = g.hidden_size, g.intermediate_size
    heads, kv_heads = g.num_attention_heads * g.head_dim, g.num_key_value_heads * g.head_dim
    for stream, q, k, v, out, norm in (
        ("", "to_q", "to_k", "to_v", "to_out", "norm"),
        ("_moe_gen", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added"),
    ):
        yield f"{layer}.input_layernorm{stream}.weight", (width,)
        yield f"{layer}.post_attention_layernorm{stream}.weight", (width,)
        yield f"{layer}.self_attn.{q}.weight", (heads, width)
        yield f"{layer}.self_attn.{k}.weight", (kv_heads, width)
        yield f"{layer}.self_attn.{v}.weight", (kv_heads, width)
        yield f"{layer}.self_attn.{out}.weight", (width, heads)
        yield f"{layer}.self_attn.{norm}_q.weight", (g.head_dim,)
        yield f"{layer}.self_attn.{norm}_k.weight", (g.head_dim,)
        yield f"{layer}.mlp{stream}.gate_proj.weight", (inner, width)
        yield f"{layer}.mlp{stream}.up_proj.weight", (inner, width)
        yield f"{layer}.mlp{stream}.down_proj.weight", (width, inner)


def _config(g: Geometry, channels: int) -> dict[str, object]:
    half = g.head_dim // 2
    side = half * 5 // 16
    return {
        "_class_name": "Cosmos3OmniTransformer",
        **asdict(g),
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "rope_axes_dim": [half - 2 * side, side, side],
        "latent_channel": channels,
        "latent_patch_size": 2,
        "patch_latent_dim": 4 * channels,
        "action_gen": True,
        "sound_gen": False,
    }
