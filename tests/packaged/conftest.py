"""A Llama of two layers and a few kilobytes in GGUF form."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pytest
from gguf import GGUFWriter

from phalanx.models.causal_lm.packaged import Source

WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 16, 24, 4, 2, 4, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "1", "2", "ĠĠ", "ab"]
MERGES = ["Ġ Ġ", "a b"]


@dataclass(frozen=True)
class TinyModel:
    """The file, and the weights that were put into it under their Hugging Face names."""

    source: Source
    weights: dict[str, np.ndarray]


def _interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head as GGUF orders them: first and second half alternate."""
    heads = rows.reshape(num_heads, 2, -1, rows.shape[1])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(rows.shape)


def _write_metadata(writer: GGUFWriter) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    draw = np.random.default_rng(0)
    writer = GGUFWriter(str(path), "llama")
    _write_metadata(writer)
    weights: dict[str, np.ndarray] = {}

    def put(gguf_name: str, name: str, *shape: int, rotated_heads: int = 0) -> None:
        value = draw.standard_normal(shape, dtype=np.float32)
        weights[name] = value
        stored = _interleaved(value, rotated_heads) if rotated_heads else value
        writer.add_tensor(f"{gguf_name}.weight", stored)

    put("token_embd", "model.embed_tokens.weight", len(TOKENS), WIDTH)
    put("output_norm", "model.norm.weight", WIDTH)
    for number in range(LAYERS):
        gguf, layer = f"blk.{number}.", f"model.layers.{number}."
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        put(f"{gguf}attn_norm", f"{layer}input_layernorm.weight", WIDTH)
        put(f"{gguf}attn_q", f"{attention}q_proj.weight", 16, WIDTH, rotated_heads=HEADS)
        put(f"{gguf}attn_k", f"{attention}k_proj.weight", 8, WIDTH, rotated_heads=KV_HEADS)
        put(f"{gguf}attn_v", f"{attention}v_proj.weight", 8, WIDTH)
        put(f"{gguf}attn_output", f"{attention}o_proj.weight", WIDTH, 16)
        put(f"{gguf}ffn_norm", f"{layer}post_attention_layernorm.weight", WIDTH)
        put(f"{gguf}ffn_gate", f"{mlp}gate_proj.weight", FFN, WIDTH)
        put(f"{gguf}ffn_up", f"{mlp}up_proj.weight", FFN, WIDTH)
        put(f"{gguf}ffn_down", f"{mlp}down_proj.weight", WIDTH, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return TinyModel(Source(path, digest), weights)
