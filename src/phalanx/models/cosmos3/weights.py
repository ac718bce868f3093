"""Where each tensor of a checkpoint goes, and which no picture, sound or action depends on."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.layers.weight_slots import Target, bias_slot, replicated, weight_slot, whole
from phalanx.models.cosmos3.config import Cosmos3Config
from phalanx.models.cosmos3.layer import LastTextLayer, MediaLayer, StreamLayer, TextLayer
from phalanx.models.cosmos3.media import MediaTokens
from phalanx.models.cosmos3.transformer import Cosmos3Transformer

Named = Iterator[tuple[str, Target]]

_TEXT = {"q": "to_q", "k": "to_k", "v": "to_v", "output": "to_out"}
_MEDIA = {"q": "add_q_proj", "k": "add_k_proj", "v": "add_v_proj", "output": "to_add_out"}


def targets_of(transformer: Cosmos3Transformer) -> dict[str, Target]:
    """Where each tensor of a checkpoint goes, by its name there."""
    config = transformer.config
    found = {
        "embed_tokens.weight": replicated(transformer.embedding, "weight"),
        "norm_moe_gen.weight": replicated(transformer.media_norm, "weight"),
        **dict(_media_targets(transformer.media)),
    }
    for index, text in enumerate(transformer.text_blocks()):
        for name, target in _text_targets(text, config):
            found[f"layers.{index}.{name}"] = target
    for index, media in enumerate(transformer.media_blocks()):
        for name, target in _gen_targets(media, config):
            found[f"layers.{index}.{name}"] = target
    last = f"layers.{config.num_hidden_layers - 1}"
    for name, target in _last_targets(transformer.last_text_layer, config):
        found[f"{last}.{name}"] = target
    return found


def unused_names(config: Cosmos3Config) -> frozenset[str]:
    """Tensors that a checkpoint has and nothing that is computed here depends on.

    They are of the text's own output, which nobody reads.
    """
    last = f"layers.{config.num_hidden_layers - 1}"
    kinds = ("weight", "bias") if config.attention_bias else ("weight",)
    dead = [f"self_attn.{part}.{kind}" for part in ("to_q", "to_out") for kind in kinds]
    dead += [f"mlp.{part}.weight" for part in ("up_proj", "down_proj")]
    if config.hidden_act == "silu":
        dead.append("mlp.gate_proj.weight")
    if config.qk_norm_for_text:
        dead.append("self_attn.norm_q.weight")
        if config.separate_text_keys:
            dead.append("self_attn.norm_k.weight")
    dead.append("post_attention_layernorm.weight")
    return frozenset({"norm.weight", "lm_head.weight", *(f"{last}.{name}" for name in dead)})


def _media_targets(media: MediaTokens) -> Named:
    linears = {
        "proj_in": media.enter,
        "proj_out": media.leave,
        "time_embedder.linear_1": media.time.first,
        "time_embedder.linear_2": media.time.second,
    }
    if media.sound is not None:
        linears |= {"audio_proj_in": media.sound.enter, "audio_proj_out": media.sound.leave}
        yield "audio_modality_embed", replicated(media.sound, "kind")
    for name, linear in linears.items():
        yield f"{name}.weight", replicated(linear, "weight")
        yield f"{name}.bias", replicated(linear, "bias")
    if media.actions is not None:
        yield "action_modality_embed", replicated(media.actions, "kind")
        for name, domains in (
            ("action_proj_in", media.actions.enter),
            ("action_proj_out", media.actions.leave),
        ):
            yield f"{name}.fc.weight", replicated(domains, "weight")
            yield f"{name}.bias.weight", replicated(domains, "bias")


def _text_targets(layer: TextLayer, config: Cosmos3Config) -> Named:
    yield from _stream_targets(layer, config, _TEXT, "")
    if layer.q_norm is not None:
        yield "self_attn.norm_q.weight", replicated(layer, "q_norm")
        yield "self_attn.norm_k.weight", replicated(layer, "k_norm")
    if layer.media_k_norm is not None:
        yield "self_attn.k_norm_und_for_gen.weight", replicated(layer, "media_k_norm")


def _gen_targets(layer: MediaLayer, config: Cosmos3Config) -> Named:
    yield from _stream_targets(layer, config, _MEDIA, "_moe_gen")
    yield "self_attn.norm_added_q.weight", replicated(layer, "q_norm")
    yield "self_attn.norm_added_k.weight", replicated(layer, "k_norm")


def _stream_targets(
    layer: StreamLayer, config: Cosmos3Config, names: dict[str, str], suffix: str
) -> Named:
    q, kv, width, inner = (
        config.q_rows,
        config.kv_rows,
        config.hidden_size,
        config.intermediate_size,
    )
    cuts = layer.cuts
    yield f"input_layernorm{suffix}.weight", replicated(layer.input_norm, "weight")
    yield f"post_attention_layernorm{suffix}.weight", replicated(layer.post_norm, "weight")
    qkv = {"weight": weight_slot(cuts["qkv"], (q + 2 * kv, width))}
    yield f"self_attn.{names['output']}.weight", whole(weight_slot(cuts["output"], (width, q)))
    if config.attention_bias:
        qkv["bias"] = bias_slot(cuts["qkv"], q + 2 * kv)
        yield f"self_attn.{names['output']}.bias", whole(bias_slot(cuts["output"], width))
    for kind, slot in qkv.items():
        yield f"self_attn.{names['q']}.{kind}", Target(slot, 0, q)
        yield f"self_attn.{names['k']}.{kind}", Target(slot, q, kv)
        yield f"self_attn.{names['v']}.{kind}", Target(slot, q + kv, kv)
    gated = layer.mlp.gated
    widen = weight_slot(cuts["widen"], ((1 + gated) * inner, width))
    if gated:
        yield f"mlp{suffix}.gate_proj.weight", Target(widen, 0, inner)
    yield f"mlp{suffix}.up_proj.weight", Target(widen, gated * inner, inner)
    yield f"mlp{suffix}.down_proj.weight", whole(weight_slot(cuts["down"], (width, inner)))


def _last_targets(layer: LastTextLayer, config: Cosmos3Config) -> Named:
    kv, width = config.kv_rows, config.hidden_size
    yield "input_layernorm.weight", replicated(layer.input_norm, "weight")
    slots = {"weight": weight_slot(layer.cuts["kv"], (2 * kv, width))}
    if config.attention_bias:
        slots["bias"] = bias_slot(layer.cuts["kv"], 2 * kv)
    for kind, slot in slots.items():
        yield f"self_attn.to_k.{kind}", Target(slot, 0, kv)
        yield f"self_attn.to_v.{kind}", Target(slot, kv, kv)
    if layer.k_norm is not None:
        name = "k_norm_und_for_gen" if config.separate_text_keys else "norm_k"
        yield f"self_attn.{name}.weight", replicated(layer, "k_norm")
