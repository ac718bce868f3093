"""Sizes of a pi policy, complete: what its tensors, its `config.json` and its user say, agreed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from phalanx.errors import CheckpointError, ConfigurationError
from phalanx.layers.gemma import GemmaShape
from phalanx.layers.siglip import SiglipShape
from phalanx.models.pi.config import PiConfig
from phalanx.models.pi.names import EMBEDDING, EXPERT, LM_HEAD, TEXT, VISION

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a checkpoint's tensors by their plain names, see `names`."""

# SigLIP So400m, whose heads are 72 wide; every other tower has to be told.
_KNOWN_VISION_HEADS = {1152: 16}


@dataclass(frozen=True)
class PiGeometry:
    """Named as in `PiConfig`."""

    vision_width: int
    vision_inner_width: int
    vision_num_layers: int
    vision_num_heads: int
    patch_size: int
    image_size: int
    num_cameras: int
    text_width: int
    text_inner_width: int
    expert_width: int
    expert_inner_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    chunk_size: int
    max_action_dim: int
    max_state_dim: int
    tokenizer_max_length: int
    num_steps: int
    min_period: float
    max_period: float

    @property
    def vision(self) -> SiglipShape:
        return SiglipShape(
            self.vision_width,
            self.vision_inner_width,
            self.vision_num_layers,
            self.vision_num_heads,
            self.patch_size,
            self.image_size,
        )

    @property
    def text(self) -> GemmaShape:
        return self._gemma(self.text_width, self.text_inner_width)

    @property
    def expert(self) -> GemmaShape:
        return self._gemma(self.expert_width, self.expert_inner_width)

    def _gemma(self, width: int, inner_width: int) -> GemmaShape:
        return GemmaShape(
            width, inner_width, self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim
        )

    def with_cameras(self, num_cameras: int | None) -> PiGeometry:
        """The same with so many cameras; as it is with None."""
        return self if num_cameras is None else replace(self, num_cameras=num_cameras)

    @property
    def image_tokens(self) -> int:
        """Tokens of one camera."""
        return self.vision.num_patches

    @property
    def max_prefix(self) -> int:
        """Tokens of a prefix with every camera and the longest prompt."""
        return self.num_cameras * self.image_tokens + self.tokenizer_max_length


PUBLISHED = PiGeometry(
    vision_width=1152,
    vision_inner_width=4304,
    vision_num_layers=27,
    vision_num_heads=16,
    patch_size=14,
    image_size=224,
    num_cameras=3,
    text_width=2048,
    text_inner_width=16384,
    expert_width=1024,
    expert_inner_width=4096,
    num_layers=18,
    num_heads=8,
    num_kv_heads=1,
    head_dim=256,
    vocab_size=257152,
    chunk_size=50,
    max_action_dim=32,
    max_state_dim=32,
    tokenizer_max_length=48,
    num_steps=10,
    min_period=4e-3,
    max_period=4.0,
)
"""Of the published models, but for the length of their prompts."""


def resolve_geometry(
    published: PiGeometry, given: PiConfig, stored: Mapping[str, Any], shapes: Shapes | None
) -> PiGeometry:
    """What the user has `given`, else what tensors and `config.json` (`stored`) say, else what the
    `published` model has. `shapes` is None without a checkpoint.

    Raises `CheckpointError` where two of them contradict each other or one is not told.
    """
    chosen: dict[str, float] = {one.name: getattr(published, one.name) for one in fields(published)}
    chosen |= _of_config(stored)
    asked = given.given()
    if shapes is not None:
        found = _of_shapes(shapes, {**chosen, **asked})
        _check(stored, found)
        for name, value in found.items():
            if asked.get(name, value) != value:
                raise CheckpointError(
                    f"config gives {name}={asked[name]}, but the checkpoint's tensors have {value}"
                )
        chosen |= found
        if "vision_num_heads" not in asked:
            chosen["vision_num_heads"] = _vision_heads(int(chosen["vision_width"]))
    chosen |= asked
    geometry = PiGeometry(**chosen)  # type: ignore[arg-type]
    _check_heads(geometry)
    return geometry


def _of_config(stored: Mapping[str, Any]) -> dict[str, float]:
    """What LeRobot's `config.json` says, or openpi's."""
    names = {
        "chunk_size": ("chunk_size", "action_horizon"),
        "max_action_dim": ("max_action_dim", "action_dim"),
        "max_state_dim": ("max_state_dim", "action_dim"),
        "tokenizer_max_length": ("tokenizer_max_length", "max_token_len"),
        "num_steps": ("num_inference_steps",),
        "min_period": ("min_period",),
        "max_period": ("max_period",),
    }
    found: dict[str, float] = {}
    for name, keys in names.items():
        value = next((stored[key] for key in keys if stored.get(key) is not None), None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"config.json: {keys[0]}={value!r} must be a positive number")
        found[name] = value
    size = stored.get("image_resolution")
    if size is not None:
        if not isinstance(size, list) or len(size) != 2 or size[0] != size[1]:
            raise CheckpointError(
                f"config.json: image_resolution={size!r} must be [side, side]: images are squares"
            )
        found["image_size"] = size[0]
    return found


def cameras_of(stored: Mapping[str, Any]) -> int | None:
    """How many cameras `config.json` names, those among them that are always empty."""
    features = stored.get("input_features")
    if not isinstance(features, Mapping):
        return None
    kinds = [one.get("type") for one in features.values() if isinstance(one, Mapping)]
    return kinds.count("VISUAL") or None


def _of_shapes(shapes: Shapes, chosen: Mapping[str, float]) -> dict[str, int]:
    """Sizes that tensors have; `chosen` has those that tell how a fused dimension is split."""
    patches = _shape(shapes, f"{VISION}.embeddings.patch_embedding.weight", 4)
    num_patches, _ = _shape(shapes, f"{VISION}.embeddings.position_embedding.weight", 2)
    side = math.isqrt(num_patches)
    if side * side != num_patches:
        raise CheckpointError(f"{num_patches} image positions are not those of a square image")
    found = {
        "vision_width": patches[0],
        "patch_size": patches[3],
        "image_size": side * patches[3],
        "vision_inner_width": _shape(shapes, f"{VISION}.encoder.layers.0.mlp.fc1.weight", 2)[0],
        "vision_num_layers": _num_layers(shapes, f"{VISION}.encoder.layers"),
        "vocab_size": _embedding(shapes)[0],
        "text_width": _embedding(shapes)[1],
        "text_inner_width": _shape(shapes, f"{TEXT}.layers.0.mlp.gate_proj.weight", 2)[0],
        "num_layers": _num_layers(shapes, f"{TEXT}.layers"),
        "expert_inner_width": _shape(shapes, f"{EXPERT}.layers.0.mlp.gate_proj.weight", 2)[0],
        "expert_width": _shape(shapes, "action_in_proj.weight", 2)[0],
        "max_action_dim": _shape(shapes, "action_in_proj.weight", 2)[1],
    }
    if (layers := _num_layers(shapes, f"{EXPERT}.layers")) != found["num_layers"]:
        raise CheckpointError(
            f"the expert has {layers} layers and the language model {found['num_layers']}; they "
            "must have equally many"
        )
    q_rows = _shape(shapes, f"{TEXT}.layers.0.self_attn.q_proj.weight", 2)[0]
    kv_rows = _shape(shapes, f"{TEXT}.layers.0.self_attn.k_proj.weight", 2)[0]
    kv_heads = int(chosen["num_kv_heads"])
    if kv_rows % kv_heads or q_rows % (kv_rows // kv_heads):
        raise CheckpointError(
            f"queries of {q_rows} and keys of {kv_rows} numbers cannot be split into heads, with "
            f"num_kv_heads={kv_heads}; give num_kv_heads in the config"
        )
    found["head_dim"] = kv_rows // kv_heads
    found["num_heads"] = q_rows // found["head_dim"]
    return found


def _check(stored: Mapping[str, Any], found: Mapping[str, int]) -> None:
    for name, value in _of_config(stored).items():
        if found.get(name, value) != value:
            raise CheckpointError(
                f"config.json gives {name}={value}, but the checkpoint's tensors have {found[name]}"
            )


def _shape(shapes: Shapes, name: str, dims: int) -> tuple[int, ...]:
    shape = shapes.get(name)
    if shape is None:
        raise CheckpointError(
            f"the checkpoint has no tensor {name!r}; it is not one of a pi policy, or its names "
            "need a weight_remap"
        )
    if len(shape) != dims:
        raise CheckpointError(f"{name} has shape {shape}; it must have {dims} dimensions")
    return shape


def _embedding(shapes: Shapes) -> tuple[int, ...]:
    return _shape(shapes, EMBEDDING if EMBEDDING in shapes else LM_HEAD, 2)


def _num_layers(shapes: Shapes, prefix: str) -> int:
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    numbers = {int(found[1]) for name in shapes if (found := pattern.match(name))}
    return max(numbers, default=-1) + 1


def _vision_heads(width: int) -> int:
    heads = _KNOWN_VISION_HEADS.get(width)
    if heads is None:
        raise CheckpointError(
            f"a vision tower of width {width} does not tell its number of heads, and neither does "
            "config.json; give config=...Config(vision_num_heads=...)"
        )
    return heads


def _check_heads(geometry: PiGeometry) -> None:
    if geometry.vision_width % geometry.vision_num_heads:
        raise ConfigurationError(
            f"vision_num_heads={geometry.vision_num_heads} does not divide the vision tower's "
            f"width of {geometry.vision_width}"
        )
    if geometry.num_heads % geometry.num_kv_heads or geometry.head_dim % 2:
        raise ConfigurationError(
            f"num_heads={geometry.num_heads} must be a multiple of num_kv_heads="
            f"{geometry.num_kv_heads}, and head_dim={geometry.head_dim} even"
        )
