"""A Llama of two layers with random weights, which loads in an instant."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from phalanx.testing.tiny_tokenizer import write_byte_level_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write_tiny_llama(directory: Path, seed: int = 0) -> Path:
    """Checkpoint and byte-level tokenizer, of 400 tokens; other seeds are other weights."""
    write_byte_level_tokenizer(directory)
    random = np.random.default_rng(seed)
    width, inner, half = 32, 48, 16

    def drawn(*shape: int) -> NDArray[np.float32]:
        return random.normal(0, 0.5, shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": drawn(400, width)}
    weights["model.norm.weight"] = np.ones(width, np.float32)
    for layer in range(2):
        shapes = {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (half, width),
            "self_attn.v_proj": (half, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = drawn(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(width, np.float32)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    return directory
