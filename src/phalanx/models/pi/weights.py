"""Where each tensor of a checkpoint goes in a policy's model, and which no action depends on."""

from __future__ import annotations

import torch

from phalanx.layers.gemma import GemmaLayer
from phalanx.layers.siglip import SiglipLayer
from phalanx.models.pi.model import PiModel
from phalanx.models.pi.names import EMBEDDING, EXPERT_HEAD, LM_HEAD, PROJECTOR, TEXT, VISION
from phalanx.models.pi.targets import (
    Named,
    Target,
    layer_norm,
    layer_targets,
    stacked,
    vector,
    whole_linear,
)


def prefix_targets(model: PiModel, *, tied: bool) -> Named:
    """The vision tower and the language model; `tied` if the checkpoint embeds by its head."""
    yield from _vision_targets(model)
    language, shape = model.language, model.geometry.text
    table = (model.geometry.vocab_size, shape.width)
    yield (LM_HEAD if tied else EMBEDDING), Target(language, "embedding", table)
    for index, layer in enumerate(language.layers):
        assert isinstance(layer, GemmaLayer)
        yield from layer_targets(f"{TEXT}.layers.{index}", layer, shape.q_rows, shape.kv_rows)
    last = f"{TEXT}.layers.{shape.num_layers - 1}"
    if isinstance(language.last, GemmaLayer):
        assert language.norm is not None
        yield from layer_targets(last, language.last, shape.q_rows, shape.kv_rows)
        yield from vector(f"{TEXT}.norm", language.norm)
        return
    yield from vector(f"{last}.input_layernorm", language.last.input_norm)
    names = {f"{last}.self_attn.{part}": shape.kv_rows for part in ("k_proj", "v_proj")}
    yield from stacked(names, language.last.kv)


def _vision_targets(model: PiModel) -> Named:
    tower, shape = model.eye.tower, model.geometry.vision
    patches = f"{VISION}.embeddings.patch_embedding"
    size = (shape.width, shape.num_channels, shape.patch_size, shape.patch_size)
    yield f"{patches}.weight", Target(tower.patches, "weight", size)
    yield f"{patches}.bias", Target(tower.patches, "bias", (shape.width,))
    table = (shape.num_patches, shape.width)
    yield f"{VISION}.embeddings.position_embedding.weight", Target(tower, "positions", table)
    for index, layer in enumerate(tower.layers):
        name = f"{VISION}.encoder.layers.{index}"
        parts = {f"{name}.self_attn.{part}_proj": shape.width for part in "qkv"}
        assert isinstance(layer, SiglipLayer)
        yield from stacked(parts, layer.qkv)
        yield from whole_linear(f"{name}.self_attn.out_proj", layer.out)
        yield from whole_linear(f"{name}.mlp.fc1", layer.up)
        yield from whole_linear(f"{name}.mlp.fc2", layer.down)
        yield from layer_norm(f"{name}.layer_norm1", layer.norm1)
        yield from layer_norm(f"{name}.layer_norm2", layer.norm2)
    yield from layer_norm(f"{VISION}.post_layernorm", tower.norm)
    yield from whole_linear(PROJECTOR, model.eye.projector)


def unused_names(model: PiModel, *, tied: bool) -> frozenset[str]:
    """Tensors of a checkpoint that no action depends on."""
    unused = {EXPERT_HEAD} if tied else {EXPERT_HEAD, LM_HEAD}
    if model.expert.values_prefix:
        return frozenset(unused)
    last = f"{TEXT}.layers.{model.geometry.num_layers - 1}"
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
    unused |= {f"{last}.{part}.weight" for part in (*parts, "mlp.down_proj")}
    unused |= {f"{last}.post_attention_layernorm.weight", f"{TEXT}.norm.weight"}
    return frozenset(unused)


@torch.no_grad()
def randomize(model: PiModel, seed: int) -> None:
    """Random weights whose products are about as long as what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            values *= 0.1
            if name.rpartition(".")[0].endswith(("norm1", "norm2", "tower.norm")):
                values += 1.0 if name.endswith("weight") else 0.0
        elif not name.endswith("embedding"):
            values /= parameter.shape[1] ** 0.5
        parameter.copy_(values)
