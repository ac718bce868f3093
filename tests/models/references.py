"""Models of transformers that Phalanx must agree with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def smollm2_reference(directory: Path):
    """transformers' Llama over the very weights of the converted checkpoint, without a copy."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        fused = {name: file.get_tensor(name) for name in file.keys()}
    weights = separate(fused, config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval().requires_grad_(False)


def save_first_layers(whole: Path, directory: Path, num_layers: int) -> Path:
    """A converted checkpoint of the first layers of `whole`, and of all that is no layer."""
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((whole / name).read_bytes())
    config = json.loads((whole / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    kept = (
        "model.embed_tokens.",
        "model.norm.",
        *(f"model.layers.{i}." for i in range(num_layers)),
    )
    with safe_open(whole / "model.safetensors", framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys() if name.startswith(kept)}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def separate(weights: dict[str, Tensor], config) -> dict[str, Tensor]:
    """Fused projections as their parts, under the names of Hugging Face."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if "qkv_proj" in name:
            parts = tensor.split([queries, keys, keys])
            for kind, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                found[name.replace("qkv_proj", kind)] = part
        elif "gate_up_proj" in name:
            for kind, part in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                found[name.replace("gate_up_proj", kind)] = part
        else:
            found[name] = tensor
    return found


def fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The opposite of `separate`."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ".q_proj." in name:
            parts = [
                weights[name.replace("q_proj", kind)] for kind in ("q_proj", "k_proj", "v_proj")
            ]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".gate_proj." in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = torch.cat([tensor, up])
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            found[name] = tensor
    return found


def log_probabilities(model, ids) -> Tensor:
    """[len(ids), vocabulary]: row i is the distribution of token i given what is before it.

    Row 0, which nothing precedes, is NaN.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    scores = torch.log_softmax(logits, dim=-1)
    return torch.cat([torch.full_like(scores[:1], torch.nan), scores[:-1]])
