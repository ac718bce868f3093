"""Where each tensor of a checkpoint goes in a decoder, by its name there."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.layers.weight_slots import Target, bias_slot, vector_slot, weight_slot, whole
from phalanx.models.causal_lm.config import DecoderConfig
from phalanx.models.causal_lm.decoder import Decoder, DecoderLayer


def targets_of(decoder: Decoder) -> dict[str, Target]:
    """Where each tensor of a checkpoint goes, by its name there."""
    config, cuts = decoder.config, decoder.cuts
    table = (config.vocab_size, config.width)
    found = {
        "model.embed_tokens.weight": whole(weight_slot(cuts["embedding"], table)),
        "model.norm.weight": whole(vector_slot(decoder.norm, "weight", config.width)),
    }
    if not config.tied_head:
        found["lm_head.weight"] = whole(weight_slot(cuts["head"], table))
    for index, layer in enumerate(decoder.blocks()):
        for name, target in _layer_targets(layer, config):
            found[f"model.layers.{index}.{name}"] = target
    return found


def _layer_targets(layer: DecoderLayer, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    q, kv, width, inner = config.q_rows, config.kv_rows, config.width, config.inner_width
    cuts = layer.cuts
    yield "input_layernorm.weight", whole(vector_slot(layer.input_norm, "weight", width))
    yield "post_attention_layernorm.weight", whole(vector_slot(layer.post_norm, "weight", width))
    yield "self_attn.o_proj.weight", whole(weight_slot(cuts["output"], (width, q)))
    gate_up = weight_slot(cuts["gate_up"], (2 * inner, width))
    yield "mlp.gate_proj.weight", Target(gate_up, 0, inner)
    yield "mlp.up_proj.weight", Target(gate_up, inner, inner)
    yield "mlp.gate_up_proj.weight", whole(gate_up)
    yield "mlp.down_proj.weight", whole(weight_slot(cuts["down"], (width, inner)))
    qkv = {"weight": weight_slot(cuts["qkv"], (q + 2 * kv, width))}
    if config.qkv_bias:
        qkv["bias"] = bias_slot(cuts["qkv"], q + 2 * kv)
    for kind, slot in qkv.items():
        yield f"self_attn.q_proj.{kind}", Target(slot, 0, q)
        yield f"self_attn.k_proj.{kind}", Target(slot, q, kv)
        yield f"self_attn.v_proj.{kind}", Target(slot, q + kv, kv)
        yield f"self_attn.qkv_proj.{kind}", whole(slot)
    if config.output_bias:
        yield "self_attn.o_proj.bias", whole(bias_slot(cuts["output"], width))
    if config.qk_norm:
        yield "self_attn.q_norm.weight", whole(vector_slot(layer, "q_norm", config.head_dim))
        yield "self_attn.k_norm.weight", whole(vector_slot(layer, "k_norm", config.head_dim))
